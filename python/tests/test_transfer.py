"""``Transfer``: waiting, looking, cancelling, and being forgotten."""

import contextlib
import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme

RandomBytes = Callable[[int], bytes]
InThreads = Callable[[Callable[[int], object], int], None]

MANY = 24 << 20
"""So many bytes that a slow engine is still busy with them while a test looks at the request."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def slow(slow_engine: deepnvme.Engine, path: Path) -> Iterator[deepnvme.Transfer]:
    """A request that is in flight for a while."""
    pending = slow_engine.start_write(bytes(MANY), path)
    yield pending
    pending.cancel()


def test_wait_returns_the_bytes_again_and_again(path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(300_000)
    pending = deepnvme.start_write(data, path, durability="data")
    assert pending.result() == 300_000
    assert pending.result(timeout=0) == 300_000
    assert pending.done()
    assert (pending.progress().bytes_done, pending.progress().bytes_total) == (300_000, 300_000)
    assert path.read_bytes() == data
    assert not pending.cancel(), "there is nothing to cancel any more"


@pytest.mark.parametrize("timeout", [0, 0.0, 0.01])
def test_a_timeout_leaves_the_request_alone(slow: deepnvme.Transfer, path: Path, timeout: float) -> None:
    with pytest.raises(TimeoutError, match=rf"write still in flight .* of {MANY} bytes done; wait again") as caught:
        slow.result(timeout)
    assert isinstance(caught.value, deepnvme.Error)
    assert 0 <= caught.value.bytes_done < MANY
    assert slow.result() == MANY
    assert path.stat().st_size == MANY


def test_invalid_timeouts(slow: deepnvme.Transfer) -> None:
    for timeout in (math.nan, -1, -math.inf, -1e-9, -(10**400)):
        with pytest.raises(ValueError, match=r"timeout is .*; it must be seconds of at least 0"):
            slow.result(timeout)
    wrong: Any
    for wrong in ("1", True, [], 1j):
        with pytest.raises(TypeError, match=r"timeout is .*; it must be seconds of at least 0"):
            slow.result(wrong)
    slow.cancel()
    with pytest.raises(deepnvme.errors.CancelledError):
        slow.result(math.inf)


def test_progress_grows(slow: deepnvme.Transfer) -> None:
    assert "in flight" in repr(slow)
    seen = [slow.progress().bytes_done]
    while not slow.done():
        progress = slow.progress()
        assert progress.bytes_total == MANY
        seen.append(progress.bytes_done)
    assert seen == sorted(seen)
    assert len({count for count in seen if count < MANY}) > 10
    assert slow.progress().bytes_done == MANY
    assert repr(slow.progress()) == f"Progress(bytes_done={MANY}, bytes_total={MANY})"
    assert "write: done" in repr(slow)


def test_cancel_gives_up_the_rest(slow: deepnvme.Transfer) -> None:
    assert slow.cancel()
    with pytest.raises(deepnvme.errors.CancelledError, match="cancelled by the caller") as caught:
        slow.result()
    assert caught.value.bytes_done == slow.progress().bytes_done < MANY
    assert slow.done()
    assert not slow.cancel()
    with pytest.raises(deepnvme.Error):
        slow.result(0)
    assert "CancelledError" in repr(slow)


def test_starting_takes_no_time_whatever_the_size(tmp_path: Path) -> None:
    with deepnvme.Engine() as engine:
        took = {}
        for size in (4096, 512 << 20):
            source = np.ones(size, np.uint8)
            best = math.inf
            for index in range(5):
                before = time.perf_counter()
                pending = engine.start_write(source, tmp_path / f"{size}-{index}")
                best = min(best, time.perf_counter() - before)
                pending.cancel()
                with contextlib.suppress(deepnvme.errors.CancelledError):
                    pending.result()
            took[size] = best
    assert took[512 << 20] < 1e-3, took


def test_the_context_manager_waits(path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(500_000)
    with deepnvme.start_write(data, path) as pending:
        pass
    assert pending.done()
    assert path.read_bytes() == data


def test_the_context_manager_raises_the_failure(path: Path) -> None:
    path.write_bytes(b"12345")
    with pytest.raises(EOFError), deepnvme.start_read(bytearray(10), path):
        pass
    with pytest.warns(ResourceWarning, match="never retrieved"):
        with pytest.raises(KeyError, match="mine"), deepnvme.start_read(bytearray(10), path):
            raise KeyError("mine")
        gc.collect()


def test_threads_wait_together(slow_engine: deepnvme.Engine, path: Path, in_threads: InThreads) -> None:
    pending = slow_engine.start_write(bytes(MANY), path)
    results: list[int] = []

    def wait(_: int) -> None:
        results.append(pending.result())

    in_threads(wait, 8)
    assert results == [MANY] * 8


def test_many_requests_at_once(engine: deepnvme.Engine, path: Path, random_bytes: RandomBytes) -> None:
    parts = [random_bytes(3000 + index) for index in range(300)]
    offsets = np.cumsum([0] + [len(part) for part in parts])
    writes = [engine.start_write(part, path, int(at)) for part, at in zip(parts, offsets, strict=False)]
    assert [pending.result() for pending in reversed(writes)] == [len(part) for part in reversed(parts)]
    assert path.read_bytes() == b"".join(parts)
    targets = [bytearray(len(part)) for part in parts]
    reads = [engine.start_read(target, path, int(at)) for target, at in zip(targets, offsets, strict=False)]
    for pending in reads:
        pending.result()
    assert targets == parts


def test_a_dropped_request_goes_on(slow_engine: deepnvme.Engine, path: Path, random_bytes: RandomBytes) -> None:
    data = np.frombuffer(random_bytes(4 << 20), np.uint8).copy()
    alive, expected = weakref.ref(data), data.tobytes()
    slow_engine.start_write(data, path)
    del data
    gc.collect()
    slow_engine.start_write(b"", path.with_name("other")).result()
    while slow_engine.stats().requests < 2:
        pass
    assert path.read_bytes() == expected
    deepnvme.start_write(b"", path).result()
    assert alive() is None, "a later call lets go of the tensors of those that are done"


def test_memory_does_not_pile_up(path: Path) -> None:
    alive = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    deepnvme.write(b"x", path)
    with deepnvme.Engine() as engine:
        for index in range(2000):
            source = np.full(100_000, index % 256, np.uint8)
            alive += 1
            weakref.finalize(source, gone)
            engine.start_write(source, path, index % 10 * 100_000 + 1)
            del source
            if index % 50 == 49:
                engine.read(bytearray(1), path)
    for _ in range(2000 // 16):
        deepnvme.read(bytearray(1), path)
    assert alive == 0


def test_an_unseen_failure_is_a_warning(path: Path) -> None:
    path.write_bytes(b"12345")
    pending = deepnvme.start_read(bytearray(10), path)
    while not pending.done():
        pass
    with pytest.warns(ResourceWarning, match=r"the error of a dropped request was never retrieved: .*file: read .* 5"):
        del pending
    pending = deepnvme.start_read(bytearray(10), path)
    with pytest.raises(EOFError):
        pending.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del pending


def test_a_request_that_fails_after_it_was_dropped_warns(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    with pytest.warns(ResourceWarning, match="the error of a dropped request was never retrieved"):
        with deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096) as engine:
            engine.start_read(bytearray((1 << 20) + 1), path)
        deepnvme.read(bytearray(1), path)


def test_the_tensor_of_a_dropped_request_is_released(slow_engine: deepnvme.Engine, path: Path) -> None:
    data = np.zeros(1 << 20, np.uint8)
    alive = weakref.ref(data)
    slow_engine.start_write(data, path)
    del data
    deadline = time.monotonic() + 30
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() is None
    assert path.stat().st_size == 1 << 20


def test_a_cancelled_request_is_no_failure(slow: deepnvme.Transfer) -> None:
    slow.cancel()
    while not slow.done():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()


def test_there_is_no_other_way_to_make_one() -> None:
    with pytest.raises(TypeError):
        deepnvme.Transfer()
    with pytest.raises(TypeError):
        type("Other", (deepnvme.Transfer,), {})
