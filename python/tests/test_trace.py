"""Traces: what happened is in the file, once, and the file is whole or absent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme

Make = Callable[[int], bytes]
Run = Callable[..., Any]
InThreads = Callable[[Callable[[int], object], int], None]


def bars(path: Path, category: str | None = None) -> list[dict[str, Any]]:
    """Return the bars of a Perfetto trace, all or those of one category."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and category in (None, event["cat"])]


def test_every_transfer_is_in_the_file_once(engine: deepnvme.Engine, tmp_path: Path, random_bytes: Make) -> None:
    content = random_bytes(500_000)
    engine.write(random_bytes(100_000), tmp_path / "before")
    before = engine.stats()
    started = time.monotonic_ns()
    with engine.trace(tmp_path / "trace.json") as trace:
        engine.write(content, tmp_path / "file", durability="full")
        target = bytearray(len(content))
        engine.read(target, tmp_path / "file")
        for offset in (0, 4096, 70_001):
            engine.read(bytearray(1000), tmp_path / "file", offset)
        with pytest.raises(deepnvme.EndOfFileError):
            engine.read(bytearray(10), tmp_path / "file", len(content))
    ended = time.monotonic_ns()
    after = engine.stats()
    engine.read(bytearray(1000), tmp_path / "file")
    assert target == content
    requests, disk = bars(tmp_path / "trace.json", "request"), bars(tmp_path / "trace.json", "disk")
    assert len(requests) == after.requests - before.requests == 6
    assert [bar["name"] for bar in requests if "failed" in bar["args"]] == ["read 10 bytes"]
    assert len(disk) == after.ops - before.ops
    written = [bar["args"]["bytes"] for bar in disk if bar["args"]["kind"] == "write"]
    assert sum(written) == after.bytes_written - before.bytes_written == len(content)
    assert {bar["args"]["file"] for bar in requests} == {str(tmp_path / "file")}
    for bar in bars(tmp_path / "trace.json"):
        assert started <= bar["ts"] * 1000 + 1
        assert (bar["ts"] + bar["dur"]) * 1000 - 1 <= ended
    summary = trace.summary()
    assert (summary["requests"], summary["ops"]) == (len(requests), len(disk))
    assert summary["bytes_written"] == len(content)
    assert 0 < summary["disk_busy_s"] <= summary["seconds"] <= (ended - started) / 1e9
    assert (summary["copies"], summary["disk_overlap"], summary["lanes"], summary["dropped"]) == (0, None, [], 0)


def test_threads_share_a_trace(
    engine: deepnvme.Engine, tmp_path: Path, random_bytes: Make, in_threads: InThreads
) -> None:
    def work(index: int) -> None:
        for step in range(5):
            engine.write(random_bytes(30_000), tmp_path / f"{index}-{step}")

    before = engine.stats()
    with engine.trace(tmp_path / "trace.json"):
        in_threads(work, 4)
    names = [bar["args"]["file"] for bar in bars(tmp_path / "trace.json", "request")]
    assert sorted(names) == sorted(str(tmp_path / f"{index}-{step}") for index in range(4) for step in range(5))
    assert len(bars(tmp_path / "trace.json", "disk")) == engine.stats().ops - before.ops


def test_own_spans_share_the_timeline_with_the_engines(tmp_path: Path) -> None:
    with deepnvme.Engine(workers=1) as engine:
        engine.span("nobody records", "compute", 1, 2)
        with engine.trace(tmp_path / "outer.json") as outer:
            start = time.monotonic_ns()
            engine.write(b"x" * 10_000, tmp_path / "file")
            with engine.trace(tmp_path / "inner.json") as inner:
                engine.span("layer <0>", "compute", start, time.monotonic_ns())
                inner.span("late", "stall", time.monotonic_ns(), time.monotonic_ns())
            with pytest.raises(ValueError, match="before it began"):
                engine.span("backwards", "compute", 2, 1)
    for trace, requests in ((outer, 1), (inner, 0)):
        summary = trace.summary()
        assert summary["requests"] == requests
        assert [(lane["name"], lane["spans"]) for lane in summary["lanes"]] == [("compute", 1), ("stall", 1)]
    named = {bar["name"]: bar for bar in bars(tmp_path / "outer.json", "span")}
    assert set(named) == {"layer <0>", "late"}
    assert abs(named["layer <0>"]["ts"] * 1000 - start) < 1
    with pytest.raises(ValueError, match="outside of the `with` block"):
        inner.span("too late", "stall", 1, 2)


def test_the_page_needs_nothing_else(tmp_path: Path, random_bytes: Make) -> None:
    with deepnvme.trace(tmp_path / "trace.html") as trace:
        deepnvme.write(random_bytes(3_000_000), tmp_path / "<file>")
        trace.span("a & b", "steps", time.monotonic_ns() - 1_000_000, time.monotonic_ns())
    page = (tmp_path / "trace.html").read_text()
    assert "&lt;file&gt;" in page
    assert "a &amp; b" in page
    assert not any(word in page for word in ("<script", "http", "<file>"))
    assert trace.summary()["bytes_written"] == 3_000_000


def test_an_unwritable_path_is_reported_before_recording(tmp_path: Path) -> None:
    with deepnvme.Engine(workers=1) as engine:
        for path, error in (
            (tmp_path / "trace.txt", ValueError),
            (tmp_path / "missing" / "trace.json", FileNotFoundError),
            (tmp_path, ValueError),
        ):
            with pytest.raises(error), engine.trace(path):
                pytest.fail("it began")
        with pytest.raises(TypeError):
            engine.trace(7)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_fails_leaves_its_trace_and_its_error(tmp_path: Path) -> None:
    def fail(engine: deepnvme.Engine) -> None:
        with engine.trace(tmp_path / "trace.json"):
            engine.write(b"x" * 5000, tmp_path / "file")
            msg = "the block's own"
            raise KeyError(msg)

    (tmp_path / "trace.json").write_text("an old one")
    with deepnvme.Engine(workers=1) as engine, pytest.raises(KeyError, match="the block's own"):
        fail(engine)
    assert len(bars(tmp_path / "trace.json", "request")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "trace.json"]


def test_a_trace_is_for_one_block_and_an_open_engine(tmp_path: Path) -> None:
    engine = deepnvme.Engine(workers=1)
    trace = engine.trace(tmp_path / "trace.json")
    assert "not begun" in repr(trace)
    with pytest.raises(ValueError, match="before the `with` block"):
        trace.summary()
    with trace:
        engine.write(b"x" * 5000, tmp_path / "file")
        engine.close()
    assert trace.summary()["requests"] == 1, "who closes the engine does not lose it"
    with pytest.raises(ValueError, match="one block"), trace:
        pass
    with pytest.raises(deepnvme.errors.ClosedError), engine.trace(tmp_path / "other.json"):
        pass
    with pytest.raises(deepnvme.errors.ClosedError):
        engine.span("a", "b", 1, 2)
    assert not (tmp_path / "other.json").exists()


def test_a_target_that_goes_away_is_an_error_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with deepnvme.Engine(workers=1) as engine, pytest.raises(FileNotFoundError), engine.trace(folder / "a.json"):
        folder.rmdir()


def test_the_trace_of_a_parent_is_not_its_childs(python: Run, tmp_path: Path) -> None:
    python("""
    import os, signal, sys
    import deepnvme

    engine = deepnvme.Engine(workers=1)
    with engine.trace("trace.json") as trace:
        engine.write(b"x" * 5000, "file")
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            # It leaves the block as anybody would, and writes nothing.
            trace.span("of the child", "lane", 1, 2)
        else:
            assert os.waitpid(pid, 0)[1] == 0
            assert not os.path.exists("trace.json")
            trace.span("of the parent", "lane", 1, 10**18)
    if pid == 0:
        assert not os.path.exists("trace.json")
        with deepnvme.trace("child.json"):
            deepnvme.write(b"child", "other")
        os._exit(0)
    assert trace.summary()["lanes"][0]["spans"] == 1
    """)
    assert [bar["name"] for bar in bars(tmp_path / "trace.json", "span")] == ["of the parent"]
    assert len(bars(tmp_path / "child.json", "request")) == 1


def test_checkpoints_are_traced_on_the_default_engine(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"weights": torch.randn(1_000_000)}
    with deepnvme.trace(tmp_path / "trace.json") as trace:
        deepnvme.save(state, tmp_path / "model.safetensors")
        assert torch.equal(deepnvme.load(tmp_path / "model.safetensors")["weights"], state["weights"])
    summary = trace.summary()
    assert min(summary["bytes_written"], summary["bytes_read"]) >= 4_000_000


def test_a_timeline_is_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with deepnvme.trace("timeline.json"):
        deepnvme.write(b"x", tmp_path / "file")
        monkeypatch.chdir("/")
    assert (tmp_path / "timeline.json").exists()
