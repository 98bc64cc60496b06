"""Traces of tensors on GPUs: every copy appears once, next to its transfers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from .test_transfer import values

NBYTES = 3 << 20


def test_every_copy_is_there_once(gpu: Any, tmp_path: Path) -> None:
    tensor = gpu.tensor(values((NBYTES,), torch.uint8, 1))
    with deepnvme.Engine(workers=2) as engine:
        with engine.trace(tmp_path / "trace.json") as trace:
            engine.write(tensor, tmp_path / "file")
            engine.read(tensor, tmp_path / "file")
        stats = engine.stats()
    summary = trace.summary()
    assert summary["copies"] == stats.gpu_copies > 2
    assert summary["bytes_copied"] == stats.bytes_to_gpu + stats.bytes_from_gpu == 2 * NBYTES
    assert 0 <= summary["disk_overlap"] <= 1
    assert 0 < summary["copies_busy_s"] < summary["seconds"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    copies = [event for event in events if event["ph"] == "X" and event["pid"] == lanes["copies cuda:0"]]
    to, out = ([bar for bar in copies if bar["args"]["kind"] == kind] for kind in ("to GPU", "from GPU"))
    assert sum(bar["args"]["bytes"] for bar in to) == sum(bar["args"]["bytes"] for bar in out) == NBYTES
    disk = [event for event in events if event["ph"] == "X" and event["cat"] == "disk"]
    assert min(bar["ts"] for bar in out) <= min(bar["ts"] for bar in disk), "a write copies first"
    assert max(bar["ts"] + bar["dur"] for bar in to) >= max(bar["ts"] + bar["dur"] for bar in disk), "and a read last"


def test_cufile_transfers_are_traced_as_such(gpu: Any, tmp_path: Path) -> None:
    tensor = gpu.tensor(values((NBYTES,), torch.uint8, 2))
    with deepnvme.Engine(gds="required") as engine:
        try:
            engine.write(tensor, tmp_path / "file")
        except deepnvme.errors.UnsupportedError as error:
            pytest.skip(str(error))
        with engine.trace(tmp_path / "trace.html") as trace:
            engine.read(tensor, tmp_path / "file")
    summary = trace.summary()
    assert (summary["bytes_gds"], summary["bytes_bounced"], summary["copies"]) == (NBYTES, 0, 0)
    assert "gds" in (tmp_path / "trace.html").read_text()


def test_the_copies_of_a_save_are_traced(gpu: Any, tmp_path: Path) -> None:
    state = {"a": gpu.tensor(values((NBYTES,), torch.uint8, 3))}
    with deepnvme.trace(tmp_path / "trace.json") as trace:
        deepnvme.save(state, tmp_path / "model.safetensors")
    summary = trace.summary()
    assert summary["bytes_copied"] >= NBYTES
    assert summary["bytes_written"] > NBYTES
