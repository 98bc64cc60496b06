"""Handles are cheap, can be shared between threads and dropped at any time, and report use in another process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

import deepnvme
from deepnvme.deepspeed import _operations, aio_handle
from deepnvme.deepspeed._operations import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    InThreads = Callable[[Callable[[int], object], int], None]

MIB = 1 << 20


def engine_threads() -> int:
    """Count threads once their number is stable: a thread is listed a little longer than it runs."""
    counts = [-1, _engine_threads_now()]
    while counts[-1] != counts[-2]:
        time.sleep(0.05)
        counts.append(_engine_threads_now())
    return counts[-1]


def _engine_threads_now() -> int:
    return sum(_name(task).startswith("deepnvme") for task in Path("/proc/self/task").iterdir())


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text(encoding="ascii")
    except OSError:
        return ""  # it has ended since it was listed


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The settings of every engine that is made. The pool is empty before and after."""
    calls: list[dict[str, Any]] = []
    original = deepnvme.Engine

    def make(**settings: Any) -> deepnvme.Engine:
        calls.append(settings)
        return original(**settings)

    gc.collect()
    _operations.pool.clear()
    monkeypatch.setattr(_operations, "Engine", make)
    yield calls
    gc.collect()
    _operations.pool.clear()


def test_settings_of_the_engine(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    for settings in ({}, {"block_size": 5000, "queue_depth": 3, "single_submit": True, "intra_op_parallelism": 2}):
        aio_handle(**settings).sync_pwrite(torch.zeros(1), str(tmp_path / "file"))  # type: ignore[arg-type]
    aio_handle(1 << 30, 1 << 20, False, False, 1000)
    assert made == [
        {
            "workers": 1,
            "queue_depth": 128,
            "block_bytes": MIB,
            "submit": "batch",
            "gds": "disabled",
            "pool_bytes": _operations.POOL_BYTES_MAX,
        },
        {
            "workers": 2,
            "queue_depth": 3,
            "block_bytes": 8192,
            "submit": "single",
            "gds": "disabled",
            "pool_bytes": 2 * 3 * 8192,
        },
    ]


def test_idle_handles_cost_nothing(made: list[dict[str, Any]]) -> None:
    before = engine_threads()
    started = time.perf_counter()
    handles = [aio_handle(intra_op_parallelism=8) for _ in range(1000)]
    elapsed = time.perf_counter() - started
    assert engine_threads() == before
    assert made == []
    # A handle of DeepSpeed takes 100 to 300 ms.
    assert elapsed < 1
    handles.clear()


def test_engines_are_used_again(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    for index in range(20):
        handle = aio_handle()
        handle.sync_pwrite(torch.full((100,), index), str(tmp_path / "file"))
        del handle
    assert len(made) == 1


def test_two_handles_do_not_share_an_engine(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    handles = [aio_handle(), aio_handle()]
    for handle in handles:
        handle.sync_pwrite(torch.zeros(100), str(tmp_path / "file"))
    assert len(made) == 2


def test_idle_engines_are_few(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    before = engine_threads()
    for depth in range(1, 11):
        aio_handle(queue_depth=depth).sync_pwrite(torch.zeros(100), str(tmp_path / "file"))
    assert len(made) == 10
    assert engine_threads() == before + _operations.IDLE_MAX
    _operations.pool.clear()
    assert engine_threads() == before


def test_dropping_a_handle_completes_its_operations(
    tmp_path: Path, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    handle = aio_handle()
    sources = [random_bytes(4 * MIB + index) for index in range(8)]
    for index, source in enumerate(sources):
        handle.async_pwrite(source, str(tmp_path / f"file{index}"))
    del handle
    for index, source in enumerate(sources):
        assert (tmp_path / f"file{index}").read_bytes() == source.numpy().tobytes()


def test_dropping_the_tensors_does_no_harm(tmp_path: Path, random_bytes: Callable[[int], torch.Tensor]) -> None:
    handle = aio_handle()
    expected = []
    for index in range(8):
        source = random_bytes(2 * MIB)
        expected.append(source.numpy().tobytes())
        handle.async_pwrite(source, str(tmp_path / f"file{index}"))
        del source
    assert handle.wait() == 8
    assert [(tmp_path / f"file{index}").read_bytes() for index in range(8)] == expected


def test_an_error_of_wait_makes_no_cycle(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    handle = aio_handle()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        handle.async_pread(torch.zeros(1000), str(tmp_path / "empty"))
        with pytest.raises(EOFError):
            handle.wait()
        gc.collect()
        # A reference cycle would keep the tensor's memory until a later collection.
        assert not [item for item in gc.garbage if isinstance(item, Operation)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


EXIT_WITH_PENDING = """
    import sys, torch
    from deepnvme.deepspeed import aio_handle
    handle = aio_handle(intra_op_parallelism=2)
    for index in range(8):
        source = torch.full((4 << 20,), index, dtype=torch.uint8)
        handle.async_pwrite(source, f"{sys.argv[1]}/file{index}")
    if sys.argv[2] == "error":
        raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("error", 3)])
def test_exit_with_operations_pending(tmp_path: Path, how: str, status: int) -> None:
    done = run_python(EXIT_WITH_PENDING, str(tmp_path), how)
    assert (done.returncode, done.stderr) == (status, "")
    for index in range(8):
        assert (tmp_path / f"file{index}").read_bytes() == bytes([index]) * (4 * MIB)


def test_an_error_that_nobody_waited_for_is_shown_at_exit(tmp_path: Path) -> None:
    program = """
        import sys, torch
        from deepnvme.deepspeed import aio_handle
        open(sys.argv[1], "wb").close()
        handle = aio_handle()
        handle.async_pread(torch.zeros(1000), sys.argv[1])
    """
    done = run_python(program, str(tmp_path / "empty"))
    assert "EndOfFileError" in done.stderr
    assert str(tmp_path / "empty") in done.stderr


def test_an_error_that_nobody_waited_for_is_shown_when_the_handle_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    (tmp_path / "empty").touch()
    handle = aio_handle()
    handle.async_pread(torch.zeros(1000), str(tmp_path / "empty"))
    del handle
    assert [type(entry.exc_value) for entry in shown] == [deepnvme.EndOfFileError]


def test_neither_copied_nor_pickled() -> None:
    handle = aio_handle()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="one in every process"):
            attempt(handle)


FORK = """
    import os, signal, sys, torch
    from deepnvme.deepspeed import aio_handle
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    handle = aio_handle()
    name = sys.argv[1]
    source = torch.arange(1 << 20)
    handle.sync_pwrite(source, name)
    handle.async_pread(torch.empty_like(source), name)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        for call in (handle.wait, lambda: handle.async_pread(torch.empty_like(source), name)):
            try:
                call()
            except RuntimeError as error:
                assert "fork" in str(error), error
            else:
                raise SystemExit("no error")
        fresh = aio_handle()
        target = torch.empty_like(source)
        assert fresh.sync_pread(target, name) == 1
        assert torch.equal(target, source)
        del handle, fresh
        sys.exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert handle.wait() == 1
    print("parent went on")
"""


def test_fork(tmp_path: Path, python_fork: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = python_fork(FORK, tmp_path / "file")
    assert done.stdout == "parent went on\n", done.stderr


def test_one_handle_in_many_threads(
    tmp_path: Path, random_bytes: Callable[[int], torch.Tensor], in_threads: InThreads
) -> None:
    handle = aio_handle(intra_op_parallelism=2)
    counts: list[int] = []
    sources = [random_bytes(50_000 + index) for index in range(6)]

    def work(number: int) -> None:
        name = str(tmp_path / f"file{number}")
        for _ in range(30):
            target = torch.zeros_like(sources[number])
            handle.async_pwrite(sources[number], name)
            handle.async_pread(target, name)
            # Another thread's wait may count the read, but it is done after this one.
            counts.append(handle.wait())
            assert torch.equal(target, sources[number])

    in_threads(work, 6)
    assert sum(counts) + handle.wait() == 6 * 30 * 2


class SlowPending:
    """A fake transfer that takes until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def result(self) -> int:
        assert self.released.wait(60)
        return 0


def test_submitting_does_not_wait_for_another_threads_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPending()
    handle = aio_handle()
    (tmp_path / "file").write_bytes(bytes(100))
    handle.sync_pread(torch.zeros(100, dtype=torch.uint8), str(tmp_path / "file"))
    operations = handle._operations
    engine = operations._engine
    assert engine is not None
    with monkeypatch.context() as patch:
        patch.setattr(operations, "_engine", FakeEngine(slow))
        handle.async_pread(torch.zeros(100, dtype=torch.uint8), str(tmp_path / "file"))
    counted: list[int] = []
    waiter = threading.Thread(target=lambda: counted.append(handle.wait()))
    waiter.start()
    while waiter.is_alive() and not operations._claimed:
        time.sleep(0.001)
    started = time.perf_counter()
    assert handle.async_pread(torch.zeros(100, dtype=torch.uint8), str(tmp_path / "file")) == 0
    assert time.perf_counter() - started < 1
    # Another wait also waits for the operation that the first one waits for.
    second = threading.Thread(target=lambda: counted.append(handle.wait()))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    slow.released.set()
    waiter.join(60)
    second.join(60)
    assert sorted(counted) == [1, 1]


class FakeEngine:
    """A fake engine whose transfers are all the same one."""

    def __init__(self, pending: SlowPending) -> None:
        self._pending = pending
        self.started = 0

    def start_read(self, _tensor: torch.Tensor, _path: object, _offset: int) -> SlowPending:
        self.started += 1
        return self._pending


def test_an_interrupted_wait_has_counted_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPending()
    handle = aio_handle()
    (tmp_path / "file").write_bytes(bytes(100))
    buffer = torch.zeros(100, dtype=torch.uint8)
    handle.async_pread(buffer, str(tmp_path / "file"))
    with monkeypatch.context() as patch:
        patch.setattr(handle._operations, "_engine", FakeEngine(slow))
        handle.async_pread(buffer, str(tmp_path / "file"))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    handle.async_pread(buffer, str(tmp_path / "file"))
    slow.released.set()
    assert handle.wait() == 3


def test_an_interrupted_start_is_counted_if_it_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: Any
) -> None:
    file, done = tmp_path / "file", SlowPending()
    file.write_bytes(bytes(100))
    done.released.set()
    handle = aio_handle()
    handle.pread(torch.empty(25), str(file), False, False)
    engine = FakeEngine(done)
    monkeypatch.setattr(handle._operations, "_engine", engine)

    def start(at: int) -> tuple[int, int]:
        engine.started = 0
        with suppress(KeyboardInterrupt), interrupted(at) as points:
            handle.async_pread(torch.empty(25), str(file))
        assert handle.wait() == engine.started, f"interrupted at point {at}"
        return points.count, engine.started

    count, _ = start(0)
    assert {start(point)[1] for point in range(1, count + 1)} == {0, 1}
    monkeypatch.undo()


def link_target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def open_files_under(folder: Path) -> list[str]:
    targets = [link_target(entry) for entry in Path("/proc/self/fd").iterdir()]
    return [target for target in targets if target.startswith(str(folder))]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    handle = aio_handle(intra_op_parallelism=2)
    source = torch.zeros(100_000)
    for _ in range(20):
        name = tmp_path / "file"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT)
        handle.async_pwrite(source, descriptor)
        handle.wait()
        os.close(descriptor)
        handle.sync_pread(source, str(name))
        handle.async_pwrite(source, str(name), 4)
        with pytest.raises(EOFError):
            handle.sync_pread(source, str(name), 1 << 30)
        assert handle.wait() == 0
        name.unlink()
        # The engine's threads may release the file a moment after the transfer.
        deadline = time.monotonic() + 10
        while open_files_under(tmp_path):
            assert time.monotonic() < deadline, open_files_under(tmp_path)


@pytest.mark.parametrize("method", ["sync_pread", "sync_pwrite", "pread", "pwrite", "read", "write", "wait"])
def test_waiting_calls_let_other_threads_run(tmp_path: Path, method: str) -> None:
    handle = aio_handle()
    name = str(tmp_path / "file")
    buffer = torch.zeros(MIB, dtype=torch.uint8)
    handle.sync_pwrite(buffer, name)
    extra = {"pread": [False, False], "pwrite": [False, False], "read": [False], "write": [False]}.get(method, [])
    started, gate, passed = threading.Event(), threading.Lock(), threading.Event()

    def work() -> None:
        started.set()
        with gate:
            passed.set()

    gate.acquire()
    other = threading.Thread(target=work)
    other.start()
    assert started.wait(60)
    interval = sys.getswitchinterval()
    # From here on a thread runs only when this one lets it.
    sys.setswitchinterval(600)
    try:
        gate.release()
        for _ in range(100):
            if method == "wait":
                handle.async_pread(buffer, name)
                handle.wait()
            else:
                getattr(handle, method)(buffer, name, *extra)
            if passed.is_set():
                break
        assert passed.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join(60)
