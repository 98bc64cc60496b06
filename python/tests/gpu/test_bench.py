"""The GPU benchmark at tiny sizes, so that it works when there is a GPU."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
_MODULES = (
    "baselines",
    "checkpoint",
    "data",
    "fake",
    "gpu",
    "loaders",
    "ours",
    "optimizer",
    "rows",
    "run",
    "streaming",
)
_NBYTES = 3 << 20
# Tools that take part with and without a real GPU.
_ALWAYS = {
    "read": {"deepnvme", "deepnvme, pinned host memory", "deepnvme to pinned, then copy_"},
    "write": {"deepnvme", "deepnvme, pinned host memory", "deepnvme to pinned, then copy_"},
    "load": {'deepnvme.load(device="cuda")', 'deepnvme.load(device="cuda"), .pt'},
    "stream": {"deepnvme.stream", "model in GPU memory"},
    "optimizer": {
        "deepnvme.optim, state on disk, through the host",
        "deepnvme.optim, state in memory, through the host",
        "torch fused, state in memory, through the host",
        "torch fused, all on the GPU",
    },
    "checkpoint": {"Checkpointer, async_", "Checkpointer, overlap", "torch.save, fsync"},
}


class Bench:
    """The benchmark's modules, and a GPU for them."""

    def __init__(self, folder: Path, gpu: Any) -> None:
        names = (*_MODULES, "targets", "transfers", "watchdog", "job", "work")
        self.modules = {name: importlib.import_module(f"gpubench.{name}") for name in names}
        self.gpu = self.modules["gpu"].RealGpu() if gpu.is_real else self.modules["fake"].FakeGpu(gpu)
        self.folder = folder

    def job(self, key: str, **values: Any) -> Any:
        """Describe the work of a small row."""
        usual = {
            "key": key,
            "is_rehearsal": not self.gpu.is_real,
            "scratch": str(self.folder / "scratch"),
            "nbytes": _NBYTES,
            "model_nbytes": 16 << 20,
            "rounds": 1,
            "rounds_s": 60,
            "row_path": str(self.folder / "row.json"),
            "stem": str(self.folder / "made"),
        }
        return self.modules["job"].Job(**{**usual, **values})

    def row(self, key: str, **values: Any) -> Any:
        """Run a small row in this process."""
        job = self.job(key, **values)
        row = self.modules["work"].run_row(job, self.gpu)
        assert job.row() == row, "it is saved as it is"
        assert not (self.folder / "scratch").exists(), "nothing stays behind"
        return row


@pytest.fixture
def bench(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(_BENCHMARKS)
    # Names of the benchmark that other tests must not find.
    before = set(sys.modules)
    importlib.import_module("common.cache").spare_others()
    yield Bench(tmp_path, gpu)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("gpubench", "common"):
            del sys.modules[name]


@pytest.mark.parametrize("key", list(_ALWAYS))
def test_every_tool_is_measured_or_skipped_with_a_reason(bench: Bench, key: str) -> None:
    row = bench.row(key)
    assert row.failure == ""
    assert {*row.samples, *row.left_out} == set(row.groups)
    assert all(row.left_out.values()), "each with its reason"
    assert all(len(samples) == 1 for samples in row.samples.values())
    assert _ALWAYS[key] <= set(row.samples), row.left_out
    (outcome,) = bench.modules["targets"].outcomes([row])
    assert (outcome.status, outcome.why) == ("passed", "")
    computes = key in ("stream", "optimizer", "checkpoint")
    assert (bench.gpu.compute_note in row.notes) == (computes and not bench.gpu.is_real)


def test_the_timeline_of_a_read_and_a_write(bench: Bench, tmp_path: Path) -> None:
    row = bench.row("timeline")
    for kind in ("read", "write"):
        assert row.metrics[kind]["bytes_copied"] == _NBYTES, row.metrics
        assert 0 <= row.metrics[kind]["disk_overlap"] <= 1
    made = {file.name for file in tmp_path.iterdir()}
    assert {"made-read.html", "made-read.trace.json", "made-write.html", "made-write.trace.json"} <= made


def test_wrong_bytes_leave_a_tool_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = bench.modules["ours"].Bounce
    monkeypatch.setattr(kind, "read", lambda _, target, path: lambda: None)
    monkeypatch.setattr(bench.modules["transfers"], "KINDS", (kind,))
    row = bench.row("read")
    assert "other bytes than the file has" in row.left_out["deepnvme"]
    assert row.samples == {}
    (outcome,) = bench.modules["targets"].outcomes([row])
    assert outcome.status == "failed"
    assert "other bytes than the file has" in outcome.why


def test_an_error_names_the_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise RuntimeError("the driver says no")

    monkeypatch.setattr(bench.modules["baselines"], "sync", fail)
    monkeypatch.setattr(bench.modules["transfers"], "KINDS", (bench.modules["baselines"].PythonCopy,))
    row = bench.row("write")
    assert row.left_out == {
        "Python to pinned, then copy_": "RuntimeError: the driver says no, in baselines.py: sync(path)"
    }


def test_other_tokens_parameters_and_states_leave_tools_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = bench.modules["optimizer"]
    monkeypatch.setattr(optimizer.OnDisk, "step", lambda _: None)
    monkeypatch.setattr(optimizer, "KINDS", (optimizer.OnDisk,))
    assert "differs from torch" in bench.row("optimizer").left_out[optimizer.OURS]
    checkpoint = bench.modules["checkpoint"]
    save = checkpoint.TorchSave.save
    other = lambda saver, step, state: save(saver, step, {**state, "model": {}})  # noqa: E731
    monkeypatch.setattr(checkpoint.TorchSave, "save", other)
    monkeypatch.setattr(checkpoint, "KINDS", (checkpoint.TorchSave,))
    assert "saved other keys" in bench.row("checkpoint").left_out[checkpoint.BASELINE]


def test_a_copy_that_reads_nothing_is_noticed_in_every_round(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = bench.modules["baselines"]
    monkeypatch.setattr(bench.modules["transfers"], "KINDS", (baselines.PythonCopy,))
    rounds = 0
    read = baselines.PythonCopy.read

    def read_once(tool: Any, target: Any, path: Path) -> Any:
        nonlocal rounds
        rounds += 1
        action = read(tool, target, path)
        # From the second round on, nothing but the pinned memory is copied.
        return action if rounds == 1 else lambda: bench.gpu.fill(target, tool._pinned)

    monkeypatch.setattr(baselines.PythonCopy, "read", read_once)
    row = bench.row("read")
    assert rounds == 2
    assert "other bytes than the file has" in row.left_out[baselines.PythonCopy.name]


def test_a_tool_that_fails_to_close_leaves_a_note(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = bench.modules["baselines"]

    class Last(baselines.PythonCopy):  # type: ignore[misc, name-defined]
        name = "last"
        is_closed = False

        def close(self) -> None:
            Last.is_closed = True

    def fail(_: Any) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(baselines.PythonCopy, "close", fail)
    monkeypatch.setattr(bench.modules["transfers"], "KINDS", (baselines.PythonCopy, Last))
    row = bench.row("write")
    assert row.failure == ""
    assert any("failed to close: OSError: no space is left" in note for note in row.notes), row.notes
    assert Last.is_closed
    assert set(row.samples) == {baselines.PythonCopy.name, "last"}


def test_memory_of_a_failed_load_is_freed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = bench.modules["loaders"]
    freed = []
    monkeypatch.setattr(loaders.Deepnvme, "load", lambda _, path: {})
    monkeypatch.setattr(loaders.Deepnvme, "free_last_load", lambda tool: freed.append(tool.name))
    monkeypatch.setattr(loaders, "KINDS", (loaders.Deepnvme,))
    row = bench.row("load")
    assert "0 tensors instead of" in row.left_out[loaders.OURS]
    assert freed == [loaders.OURS]


def test_states_with_more_or_fewer_elements_differ(bench: Bench) -> None:
    checkpoint = bench.modules["checkpoint"]
    checkpoint._compare("it", {"a": [1, 2]}, {"a": [1, 2]})
    for loaded in ([1], [1, 2, 3]):
        with pytest.raises(bench.modules["data"].Mismatch, match=r"elements in \.a"):
            checkpoint._compare("it", {"a": loaded}, {"a": [1, 2]})


def test_a_verdict_names_the_tool_that_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = bench.modules["checkpoint"]

    def fail(*_: Any) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(checkpoint.TorchSave, "save", fail)
    monkeypatch.setattr(checkpoint, "KINDS", (checkpoint.Async, checkpoint.TorchSave))
    verdicts = bench.modules["targets"].judge([bench.row("checkpoint")])
    (lost,) = [verdict for verdict in verdicts if "seconds of training lost" in verdict.text]
    assert lost.met is None
    assert lost.why.startswith(f"{checkpoint.BASELINE}: OSError: no space is left")


# A row with tools that hang, or die, at the named moment.
_WORKER = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from gpubench import rows, tool, work, worker
from common.measure import Sample

class Tool(tool.ToolBase):
    group = "baseline"

class Good(Tool):
    name = "good"

class Bad(Tool):
    name = "bad"
    group = "deepnvme" if {moment!r} == "ours hangs later" else "baseline"
    def __init__(self, setup):
        if {moment!r} == "hangs at first":
            time.sleep(1000)
        if {moment!r} == "dies":
            os.abort()

def row(setup, row, limits):
    row.ours = "good"
    count = 0
    def once(one, is_first):
        nonlocal count
        count += 1
        if "later" in {moment!r} and count > 4 and one.name == "bad":
            time.sleep(1000)
        return Sample(1.0, 1.0, 10**9)
    return rows.run_rounds(row, rows.construct(row, (Good, Bad), setup, limits), limits, once)

work.ROWS["read"] = row
worker.main()
"""


@pytest.mark.parametrize("moment", ["hangs at first", "hangs later", "ours hangs later", "dies"])
def test_a_row_that_hangs_or_dies_is_ended(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    watchdog = bench.modules["watchdog"]
    script = tmp_path / "worker.py"
    script.write_text(_WORKER.format(benchmarks=str(_BENCHMARKS), moment=moment))
    monkeypatch.setattr(watchdog, "COMMAND", [sys.executable, str(script)])
    if not bench.gpu.is_real:
        # The other process shares this variable, and none of this driver.
        monkeypatch.setenv("DEEPNVME_FAKE_DRIVER", str(importlib.import_module(f"{__package__}.fake_driver").library()))
    start = time.monotonic()
    row, _ = watchdog.run(bench.job("read", rounds=2), tmp_path, watchdog.Limits(row_s=100, turn_s=2))
    assert time.monotonic() - start < 100
    assert ("in once" if "later" in moment else "in __init__") in row.stacks
    if "later" in moment:
        assert "at: bad, round 2; its rounds so far are kept" in (row.failure if "ours" in moment else row.notes[0])
        assert bool(row.failure) == ("ours" in moment)
        assert len(row.samples["good"]) >= 1
    else:
        # The row ran again without it.
        assert row.failure == ""
        assert list(row.left_out) == ["bad"]
        assert ("SIGABRT" if moment == "dies" else "killed after") in row.left_out["bad"]
        assert len(row.samples["good"]) == 2


def test_baselines_whose_turn_comes_too_late_are_left_out(bench: Bench) -> None:
    row = bench.row("write", rounds_s=0)
    assert row.left_out["Python to pinned, then copy_"] == "the time of its row was over before its turn"
    assert {"deepnvme", "deepnvme, pinned host memory"} == set(row.samples)


def test_no_row_begins_after_the_time_is_over(bench: Bench, tmp_path: Path) -> None:
    run = bench.modules["run"]
    plan = run.Plan(_NBYTES, _NBYTES, rounds=1, rounds_s=1, minutes=0.1, keys=("read",), is_rehearsal=True)
    record = run.run(plan, tmp_path / "scratch", tmp_path / "results")
    (outcome,) = record["outcomes"]
    assert outcome["status"] == "failed"
    assert outcome["why"] == "not begun: the 0.1 minutes of the whole run are over"
    assert list((tmp_path / "scratch").iterdir()) == [], "nothing stays behind"
