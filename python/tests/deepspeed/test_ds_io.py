"""DeepSpeed's own benchmark, `deepspeed.nvme`, on our engine."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

MIB = 1 << 20


def options(folder: Path, *, read: bool, **changes: Any) -> argparse.Namespace:
    """Return the arguments that `ds_io` parses, for one process and one transfer."""
    defaults = {
        "read": read,
        "io_size": MIB,
        "block_size": 128 << 10,
        "queue_depth": 8,
        "single_submit": False,
        "sequential_requests": False,
        "validate": True,
        "io_parallel": 1,
        "gpu": False,
        "use_gds": False,
        "slow_bounce_buffer": False,
        "use_accelerator_pin_memory": False,
        "different_file_each_iteration": False,
        "total_loops": 2,
        "mapping_list": [(0, str(folder))],
    }
    return argparse.Namespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"io_parallel": 3, "single_submit": True},
        {"sequential_requests": True, "io_size": 3 * MIB + 1024},
        {"use_accelerator_pin_memory": True},
        {"different_file_each_iteration": True},
    ],
    ids=["default", "parallel", "sequential", "ordinary memory", "many files"],
)
def test_aio_handle_engine(
    on_our_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    assert on_our_engine
    engine_module = importlib.import_module("deepspeed.nvme.ds_aio_handle")

    def create(name: str, size_bytes: int) -> None:
        Path(name).write_bytes(os.urandom(size_bytes))

    # It runs `dd`, which some machines lack.
    monkeypatch.setattr(engine_module, "create_file", create)
    for read in (False, True):
        args = options(tmp_path, read=read, **changes)
        engine = engine_module.AIOHandle_Engine(args, 0, read)
        assert type(engine.ctxt["handle"]).__module__ == "deepnvme.deepspeed.async_io"
        if not read:
            engine.ctxt["buffer"].random_(256)
        for loop in range(args.total_loops):
            (engine.read if read else engine.write)(args, 0, loop)
            content = Path(engine.ctxt["file"][loop]).read_bytes()
            assert content == engine.ctxt["buffer"].numpy().tobytes()
        assert len(engine.ctxt["elapsed_sec"]) == args.total_loops
        engine.fini()


def test_aio_basic_engine(on_our_engine: Any, tmp_path: Path) -> None:
    assert on_our_engine
    engine_module = importlib.import_module("deepspeed.nvme.ds_aio_basic")
    args = options(tmp_path, read=False)
    engine = engine_module.AIOBasic_Engine(args, 0, False)
    engine.write(args, 0, 0)
    written = engine.ctxt["buffer"].clone()
    assert Path(engine.ctxt["file"]).read_bytes() == written.numpy().tobytes()
    engine.ctxt["buffer"].zero_()
    engine.read(args, 0, 0)
    assert torch.equal(engine.ctxt["buffer"], written)
    engine.fini()


DS_IO = "import deepnvme.deepspeed as d; d.install(); from deepspeed.nvme import ds_io_main; ds_io_main()"


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("direction", "processes", "extra"),
    [("Write", 1, ["--io_parallel", "2"]), ("Read", 2, ["--single_submit", "--validate"])],
)
def test_ds_io_program(tmp_path: Path, direction: str, processes: int, extra: list[str]) -> None:
    size = 4 * MIB
    if direction == "Read":
        extra = ["--read", *extra]
        for process in range(processes):
            (tmp_path / f"_aio_read_{size}.pt.{process}_0").write_bytes(os.urandom(size))
    arguments = ["--folder", str(tmp_path), "--io_size", "4M", "--loops", "2", "--block_size", "512K"]
    done = subprocess.run(
        [sys.executable, "-c", DS_IO, *arguments, "--multi_process", str(processes), *extra],
        # No compiler and no ninja, also in worker processes.
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successful validation of command line arguments" in done.stdout
    for line in (rf"Task {direction} Latency = \S+ sec", rf"E2E {direction} Speed = \S+ GB/sec"):
        assert re.search(line, done.stdout), done.stdout
    if direction == "Write":
        assert (tmp_path / f"_aio_write_{size}.pt.0_0").stat().st_size == size
