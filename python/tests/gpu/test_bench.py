"""The GPU benchmark at tiny sizes, so that it works when there is a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme._checkpoint import load_buffer
from deepnvme._utils import tensors

_BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
_NBYTES = 3 << 20


class BenchGpu:
    """The fake driver behind the interface that the benchmark expects of a GPU."""

    is_real = False
    device = "cuda:0"

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu

    def tensor(self, host: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = self._gpu.tensor(host)
        return tensor

    def pinned(self, nbytes: int) -> torch.Tensor:
        return deepnvme.pinned_empty(nbytes, dtype=torch.uint8)

    def fill(self, target: torch.Tensor, host: torch.Tensor) -> None:
        self._gpu.driver.poke(target.data_ptr(), host.numpy().tobytes())

    def drain(self, host: torch.Tensor, source: torch.Tensor) -> None:
        host.copy_(self._gpu.to_host(source))

    def spoil(self, target: torch.Tensor) -> None:
        self._gpu.driver.poke(target.data_ptr(), b"\xa5" * target.nbytes)

    def same(self, tensor: torch.Tensor, host: torch.Tensor) -> bool:
        ours, theirs = (one.contiguous().view(-1).view(torch.uint8) for one in (self._gpu.to_host(tensor), host))
        return torch.equal(ours, theirs)

    def wait(self) -> None:
        pass

    def load(self, path: str, engine: deepnvme.Engine) -> dict[str, torch.Tensor]:
        def make(nbytes: int, device: torch.device) -> torch.Tensor:
            return self.tensor(torch.zeros(nbytes, dtype=torch.uint8))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_buffer, "allocate_on_gpu", make)
            patch.setattr(torch.Tensor, "to", lambda tensor, _: tensor)
            # torch itself does not see the simulated GPU.
            patch.setattr(tensors, "_check_cuda", lambda *_: None)
            state: dict[str, torch.Tensor] = deepnvme.load(path, device="cuda:0", engine=engine)
        return state

    def facts(self) -> dict[str, object]:
        return {"name": "fake"}


@pytest.fixture
def bench(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules by name, and a GPU for them."""
    monkeypatch.syspath_prepend(_BENCHMARKS)
    # Names of the benchmark that other tests must not find.
    before = set(sys.modules)
    modules = {name: importlib.import_module(f"gpubench.{name}") for name in ("gpu", "run", "rows", "loaders")}
    # Page cache and pending writes belong to other tests.
    cache = importlib.import_module("storagebench.cache")
    monkeypatch.setattr(cache, "drop_method", lambda: "posix_fadvise")
    monkeypatch.setattr(cache.os, "sync", lambda: None)
    if gpu.is_real:
        yield modules, modules["gpu"].RealGpu()
    else:
        yield modules, BenchGpu(gpu)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("gpubench", "storagebench"):
            del sys.modules[name]


def test_every_baseline_is_measured_or_skipped_with_a_reason(bench: Any, tmp_path: Path) -> None:
    modules, gpu = bench
    pace = modules["rows"].Pace(rounds=1, seconds=60)
    record = modules["run"].run(gpu, tmp_path / "scratch", tmp_path / "results", nbytes=_NBYTES, pace=pace)
    movers, loaders = modules["run"].MOVERS, modules["loaders"].KINDS
    wanted = {"read": movers, "write": movers, "load": loaders}
    assert [row["key"] for row in record["rows"]] == list(wanted)
    for row in record["rows"]:
        names = {kind.name for kind in wanted[row["key"]]}
        assert {*row["samples"], *row["left_out"]} == names, row["key"]
        assert all(row["left_out"].values()), "each with its reason"
        assert all(len(samples) == 1 for samples in row["samples"].values())
        must = {loaders[0].name} if row["key"] == "load" else {"deepnvme", "deepnvme, pinned host memory"}
        must |= {"deepnvme to pinned, then copy_"} if row["key"] != "load" else set()
        assert must <= set(row["samples"]), row["left_out"]
    ratios = [target for target in record["targets"] if "pinned host memory" in target["text"]]
    assert len(ratios) == 2
    assert all(target["measured"] > 0 for target in ratios)
    for kind in ("read", "write"):
        figures = record["timelines"][kind]
        assert figures["bytes_copied"] == _NBYTES, figures
        assert 0 <= figures["copies_hidden"] <= 1
    (path,) = (tmp_path / "results").glob("*-gpu.json")
    assert json.loads(path.read_text()) == record
    made = {file.name.partition("-gpu")[2] for file in (tmp_path / "results").iterdir()}
    assert {"-read.html", "-read.trace.json", "-write.html", "-write.trace.json"} <= made
    assert list((tmp_path / "scratch").iterdir()) == [], "nothing stays behind"


def test_wrong_bytes_leave_a_tool_out(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, gpu = bench
    kind = modules["run"].MOVERS[0]
    monkeypatch.setattr(kind, "read", lambda _, target, path: lambda: None)
    monkeypatch.setattr(modules["run"], "MOVERS", (kind,))
    monkeypatch.setattr(modules["loaders"], "KINDS", ())
    pace = modules["rows"].Pace(rounds=1, seconds=60)
    record = modules["run"].run(gpu, tmp_path, tmp_path / "results", nbytes=1 << 20, pace=pace)
    read, write, _ = record["rows"]
    assert "other bytes than the file has" in read["left_out"]["deepnvme"]
    assert read["samples"] == {}
    assert list(write["samples"]) == ["deepnvme"]
