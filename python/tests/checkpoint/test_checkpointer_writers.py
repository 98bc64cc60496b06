"""One process writes into a folder at a time, saves of threads and signal handlers take turns, forked children read."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme import errors
from programs import output_of, program, status_of

from .runs import save_all, state_of
from .states import assert_same, manifest_of_missing

InThreads = Callable[[Callable[[int], object], int], None]

pytestmark = pytest.mark.filterwarnings("error")


def test_the_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = (deepnvme.Checkpointer(tmp_path, keep=3) for _ in range(2))
    for step in (1, 2, 3):
        first.save(step, state_of(step))
    with pytest.raises(errors.LockedError, match="another Checkpointer of this process "):
        second.save(11, state_of(11))
    assert_same(first.restore(), state_of(3))
    assert [entry.step for entry in deepnvme.Checkpointer(tmp_path).checkpoints] == [1, 2, 3], "reading needs no lock"
    first.close()
    second.save(11, state_of(11))
    assert [entry.step for entry in second.checkpoints] == [2, 3, 11], "what the first saved counts"
    with pytest.raises(errors.LockedError):
        first.save(4, state_of(4))
    del second
    first.save(4, state_of(4))
    assert [entry.step for entry in first.checkpoints] == [3, 11, 4]
    first.close()
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"manifest.json", *(f"step-{step:08}.pt" for step in (3, 4, 11))}


HOLDER = """
import os, signal, sys, time, torch, deepnvme
checkpointer = deepnvme.Checkpointer(sys.argv[1])
checkpointer.save(1, {"a": torch.ones(1000)})
# The child gives the lock up as it starts to run.
running, runs = os.pipe()
child = os.fork()
if child == 0:
    os.write(runs, b"x")
    signal.alarm(60)
    time.sleep(1000)
os.read(running, 1)
print(os.getpid(), child, flush=True)
time.sleep(1000)
"""


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    with program(HOLDER, tmp_path) as holder:
        pid, child = map(int, holder.stdout.readline().split())
        try:
            checkpointer = deepnvme.Checkpointer(tmp_path)
            with pytest.raises(errors.LockedError, match=f"process {pid} "):
                checkpointer.save(2, state_of(2))
            holder.kill()
            holder.wait()
            # Its child outlives it, and has inherited no lock on the folder.
            assert checkpointer.save(2, state_of(2))
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)
    checkpointer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "step-00000001.pt", "step-00000002.pt"}


def test_a_foreign_lock_file(tmp_path: Path) -> None:
    lock = tmp_path / ".deepnvme-lock"
    lock.write_text("mine")
    with deepnvme.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
        with pytest.raises(errors.LockedError):
            deepnvme.Checkpointer(tmp_path).save(2, state_of(2))
    assert lock.read_text() == "mine"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(deepnvme.Error, match=r"\.deepnvme-lock.*regular file"):
        deepnvme.Checkpointer(tmp_path).save(2, state_of(2))


def test_a_lock_file_that_was_removed(tmp_path: Path) -> None:
    first = deepnvme.Checkpointer(tmp_path)
    first.save(1, state_of(1))
    (tmp_path / ".deepnvme-lock").unlink()
    second = deepnvme.Checkpointer(tmp_path)
    second.save(2, state_of(2))
    with pytest.raises(errors.LockedError):
        first.save(3, state_of(3))
    second.close()
    first.save(3, state_of(3))
    assert [entry.step for entry in first.checkpoints] == [1, 2, 3]
    first.close()


@pytest.mark.parametrize("async_", [False, True])
def test_threads_that_save_through_one(tmp_path: Path, async_: bool, in_threads: InThreads) -> None:
    with deepnvme.Checkpointer(tmp_path, keep=4, async_=async_) as checkpointer:

        def save(number: int) -> None:
            for step in range(10 * number, 10 * number + 4):
                assert checkpointer.save(step, state_of(step))

        in_threads(save, 4)
        checkpointer.wait()
        assert checkpointer.stats().saves == 16
        listed = checkpointer.checkpoints
        assert len(listed) == 4
        for entry in listed:
            assert_same(checkpointer.restore(entry.step, verify="full"), state_of(entry.step))
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", *(entry.path.name for entry in listed)}


HANDLER = """
import os, random, signal, sys, threading, time, torch, deepnvme
folder, async_, seed = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
checkpointer = deepnvme.Checkpointer(folder, keep=None, async_=async_, durability="none")
steps, said = iter(range(1000, 2000)), []
def handle(*_):
    step = next(steps)
    checkpointer.save(step, {"a": torch.full((30_000,), float(step)), "step": step})
    said.append(step)
    handled.release()
handled = threading.Semaphore(0)
signal.signal(signal.SIGUSR1, handle)
def shoot():
    rng = random.Random(seed)
    # On a busy machine signals without end would leave no time for the saves that they interrupt.
    for _ in range(50):
        if over:
            return
        time.sleep(rng.random() * 0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        handled.acquire(timeout=60)
over = False
# A program that fails ends nevertheless.
shooter = threading.Thread(target=shoot, daemon=True)
shooter.start()
for step in range(8):
    checkpointer.save(step, {"a": torch.full((30_000,), float(step)), "step": step})
    said.append(step)
over = True
shooter.join()
checkpointer.close()
print(*said, "end", flush=True)
"""


@pytest.mark.parametrize("async_", [False, True])
def test_a_signal_handler_that_saves_during_a_save(tmp_path: Path, async_: bool) -> None:
    for seed in range(1):
        folder = tmp_path / str(seed)
        with program(HANDLER, folder, async_, seed) as saver:
            text = saver.stdout.read()
            assert saver.wait() == 0
        *said, end = text.split()
        assert end == "end"
        steps = sorted(map(int, said))
        assert len(steps) > 8
        checkpointer = deepnvme.Checkpointer(folder)
        assert sorted(entry.step for entry in checkpointer.checkpoints) == steps
        for step in steps:
            assert_same(checkpointer.restore(step, verify="full"), state_of(step))


EXITING = """
import signal, sys, threading, time, os, torch, deepnvme
checkpointer = deepnvme.Checkpointer(sys.argv[1], keep=None, durability="none")
handled = False
def handle(*_):
    global handled
    checkpointer.save(99, {"a": torch.full((30_000,), 99.0), "step": 99})
    handled = True
    sys.exit(7)
signal.signal(signal.SIGTERM, handle)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
step = 0
try:
    # Python swallows an exception that a handler raises while an object is thrown away.
    while not handled:
        checkpointer.save(step % 90, {"a": torch.full((30_000,), float(step % 90)), "step": step % 90})
        step += 1
except SystemExit as left:
    assert left.code == 7
    sys.exit(0)
"""


def test_a_handler_that_saves_and_exits(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        assert status_of(EXITING, folder) == 0
        checkpointer = deepnvme.Checkpointer(folder)
        assert_same(checkpointer.restore(99, verify="full"), state_of(99))
        for entry in checkpointer.checkpoints:
            assert_same(checkpointer.restore(entry.step, verify="full"), state_of(entry.step))
        with checkpointer:
            checkpointer.save(100, state_of(100))
        there = {path.name for path in folder.iterdir()}
        assert there == {"manifest.json", *(entry.path.name for entry in checkpointer.checkpoints)}


FORKING = """
import faulthandler, os, sys, threading, time, torch, deepnvme
folder, kind = sys.argv[1:]
checkpointer = deepnvme.Checkpointer(folder, async_=kind != "sync")
if kind == "slow":
    # One small file that takes a second and longer.
    pause = threading.Event()
    commit = checkpointer._history.commit
    def slow(*arguments):
        time.sleep(1.5)
        return commit(*arguments)
    checkpointer._history.commit = slow
state = {"a": torch.ones(30_000)}
if kind != "closed-before":
    checkpointer.save(1, state)
if kind == "closed":
    checkpointer.close()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    calls = {
        "wait": checkpointer.wait, "save": lambda: checkpointer.save(2, state), "close": checkpointer.close,
        "restore": checkpointer.restore, "wait_for_tensors": checkpointer.wait_for_tensors,
        "fetch_parts": checkpointer.fetch_parts, "latest": checkpointer.latest,
        "checkpoints": lambda: checkpointer.checkpoints, "overlap": lambda: checkpointer.overlap().__enter__(),
        "with": lambda: checkpointer.__enter__(), "end": lambda: checkpointer.__exit__(None, None, None),
        "stats": checkpointer.stats,
    }
    for name, call in calls.items():
        began = time.perf_counter()
        try:
            call()
            print(name, "returned", flush=True)
        except deepnvme.errors.ClosedError as error:
            if "parent" not in str(error) and "forked" not in str(error):
                print(name, error, flush=True)
        except BaseException as error:
            print(name, repr(error), flush=True)
        if time.perf_counter() - began > 0.9:
            print(name, "took long", flush=True)
    repr(checkpointer)
    del checkpointer, calls
    os._exit(0)
os.waitpid(child, 0)
checkpointer.save(3, state)
checkpointer.close()
print([entry.step for entry in checkpointer.checkpoints], flush=True)
"""


@pytest.mark.parametrize("kind", ["sync", "async", "slow", "closed"])
def test_a_forked_child_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    assert output_of(FORKING, tmp_path, kind) == "[1, 3]\n"


READING = """
import os, signal, sys, torch, deepnvme
checkpointer = deepnvme.Checkpointer(sys.argv[1])
assert checkpointer.restore()["step"] == 2
child = os.fork()
if child == 0:
    signal.alarm(60)
    status = 1
    try:
        assert checkpointer.restore(1)["step"] == 1
        assert checkpointer.latest().step == 2 and len(checkpointer.checkpoints) == 2
        checkpointer.wait()
        try:
            checkpointer.save(3, {})
        except deepnvme.errors.ClosedError as error:
            status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
checkpointer.close()
print("good", flush=True)
"""


def test_a_forked_child_may_go_on_reading(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2)
    assert output_of(READING, tmp_path) == "good\n"


def test_a_save_of_a_signal_handler_while_the_manifest_is_read(tmp_path: Path) -> None:
    """The text that was read before is older than the manifest that the handler wrote."""
    warnings.simplefilter("ignore")  # of the missing files; pytest restores the filters
    (tmp_path / "manifest.json").write_text(manifest_of_missing(50_000))
    checkpointer, saved = deepnvme.Checkpointer(tmp_path), []

    def handler(*_: object) -> None:
        saved.append(checkpointer.save(1_000_000, {"a": torch.ones(2)}))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        while not saved:
            _ = checkpointer.checkpoints
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [entry.step for entry in checkpointer.checkpoints] == [1_000_000]
    checkpointer.close()
