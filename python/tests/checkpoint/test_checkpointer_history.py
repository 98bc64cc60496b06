"""One history for each folder: unlisted files are kept, one process writes at a time, and saves take turns."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import errors

from .programs import program, run
from .states import assert_same


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((30_000,), float(step)), "step": step}


def save_all(folder: Path, *steps: int, **options: Any) -> None:
    with deepnvme.Checkpointer(folder, keep=None, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step))


@pytest.fixture(autouse=True)
def _only_expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_checkpoints_that_were_copied_here_stay(tmp_path: Path) -> None:
    save_all(tmp_path / "old", 10, 20, 30)
    folder = tmp_path / "c"
    folder.mkdir()
    copied = {}
    for path in (tmp_path / "old").glob("step-*"):
        copied[path.name] = path.read_bytes()
        (folder / path.name).write_bytes(copied[path.name])
    with (
        pytest.warns(UserWarning, match=r"step-00000010\.pt, step-00000020\.pt, step-00000030\.pt"),
        deepnvme.Checkpointer(folder, keep=1) as checkpointer,
    ):
        for step in (31, 30, 32):
            checkpointer.save(step, state_of(step))
    assert [entry.path.name for entry in checkpointer.checkpoints] == ["step-00000032.pt"]
    assert {path.name for path in folder.iterdir()} == {*copied, "manifest.json", "step-00000032.pt"}
    assert all((folder / name).read_bytes() == text for name, text in copied.items())


def test_a_step_whose_name_is_taken_gets_another(tmp_path: Path) -> None:
    (tmp_path / "step-00000007.pt").write_text("mine")
    with pytest.warns(UserWarning, match=r"step-00000007\.pt"), deepnvme.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state_of(7))
        assert [entry.path.name for entry in checkpointer.checkpoints] == ["step-00000007-1.pt"]
        assert_same(checkpointer.restore(7, verify="full"), state_of(7))
    assert (tmp_path / "step-00000007.pt").read_text() == "mine"


def test_what_was_put_in_the_place_of_a_checkpoint_stays(tmp_path: Path) -> None:
    with deepnvme.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state_of(1))
        (tmp_path / "step-00000001.pt").write_text("mine now")
        with pytest.warns(UserWarning, match=r"step-00000001\.pt.*is kept"):
            checkpointer.save(2, state_of(2))
        checkpointer.save(3, state_of(3))
    assert (tmp_path / "step-00000001.pt").read_text() == "mine now"
    assert [entry.step for entry in checkpointer.checkpoints] == [3]


def test_the_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = (deepnvme.Checkpointer(tmp_path, keep=3) for _ in range(2))
    for step in (1, 2, 3):
        first.save(step, state_of(step))
    with pytest.raises(errors.LockedError, match=f"process {os.getpid()} "):
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
    assert [entry.step for entry in first.checkpoints] == [3, 4, 11]
    first.close()
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"manifest.json", *(f"step-{step:08}.pt" for step in (3, 4, 11))}


HOLDER = """
import os, signal, sys, time, torch, deepnvme
checkpointer = deepnvme.Checkpointer(sys.argv[1])
checkpointer.save(1, {"a": torch.ones(1000)})
child = os.fork()
if child == 0:
    signal.alarm(60)
    time.sleep(1000)
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
def test_threads_that_save_through_one(tmp_path: Path, async_: bool) -> None:
    failures: list[BaseException] = []
    with deepnvme.Checkpointer(tmp_path, keep=4, async_=async_) as checkpointer:

        def save(first: int) -> None:
            try:
                for step in range(first, first + 4):
                    assert checkpointer.save(step, state_of(step))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=save, args=(10 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
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
            assert saver.wait() == 0, text
        *said, end = text.split()
        assert end == "end"
        steps = sorted(map(int, said))
        assert len(steps) > 8
        checkpointer = deepnvme.Checkpointer(folder)
        assert [entry.step for entry in checkpointer.checkpoints] == steps
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
        assert run(EXITING, folder) == 0
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
    with program(FORKING, tmp_path, kind) as forking:
        assert forking.stdout.read() == "[1, 3]\n"


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
    with program(READING, tmp_path) as reading:
        assert reading.stdout.read() == "good\n"


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    save_all(folder, 1, 2)
    with deepnvme.Checkpointer(folder, keep=1) as checkpointer:
        checkpointer.save(3, state_of(3))
        assert_same(checkpointer.restore(), state_of(3))
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "step-00000003.pt"}


# Names of checkpoints, lists, parts, shards, temporaries and locks, also of older versions.
FOREIGN = [
    *(f"step-{step:08}{end}" for step in (1, 2, 3, 77) for end in ("-1.pt", ".pt.part-00-of-02", ".safetensors",
      ".pt.stripes.json", ".pt.stripes.json.99.tmp", ".safetensors.part-00-of-02")),
    *(f".step-{step:08}.pt.deepnvme-tmp-{end}" for step in (1, 2, 77) for end in ("1-0", "99999-5", "0" * 32,
      "1f-0-0123456789abcdef", "1f-17f3a2b1c4d5e6f7-0123456789abcdef")),
    ".manifest.json.deepnvme-tmp-1-0", ".manifest.json.deepnvme-tmp-1f-0-0123456789abcdef", "manifest.json.1.tmp",
    ".deepnvme-lock", "step-00000088.pt", "step-00000089.safetensors", "deepnvme.json",
    "shard-00000-01234567.safetensors",
    "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "..deepnvme-tmp-1-0",
]  # fmt: skip
FOREIGN_FOLDERS = ["step-00000090", "step-00000004", ".step-00000005.deepnvme-tmp-1-0",
                   ".step-00000006.deepnvme-tmp-1f-0-0123456789abcdef"]  # fmt: skip

TRAINER = """
import sys, torch, warnings, deepnvme
warnings.simplefilter("ignore")
checkpointer = deepnvme.Checkpointer(sys.argv[1], keep=2, async_=True, durability="data")
latest = checkpointer.latest()
step = latest.step if latest else 0
while True:
    step += 1
    checkpointer.save(step, {"a": torch.full((300_000,), float(step)), "step": step})
    print(step, flush=True)
"""


def foreign_in(folder: Path) -> dict[str, bytes]:
    """Fill a folder with foreign files."""
    folder.mkdir()
    contents = {}
    for name in FOREIGN:
        contents[name] = f"foreign {name}".encode()
    for name in FOREIGN_FOLDERS:
        (folder / name).mkdir()
        contents[f"{name}/deepnvme.json"] = b"{}"
        contents[f"{name}/shard-00000-01234567.safetensors"] = b"foreign"
    for name, text in contents.items():
        (folder / name).write_bytes(text)
    return contents


def test_foreign_files_of_every_name_keep_every_byte(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    contents = foreign_in(folder)
    rng = random.Random(20261123)

    def check() -> None:
        for name, text in contents.items():
            assert (folder / name).read_bytes() == text, name

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for suffix in ("pt", "safetensors"):
            with deepnvme.Checkpointer(folder, keep=2, format=suffix) as checkpointer:
                for step in (1, 2, 3, 3, 4, 5, 6, 77):
                    state = {"a": torch.full((3000,), float(step))}
                    checkpointer.save(step, state)
                    assert_same(checkpointer.restore(step, verify="full"), state)
            check()
        last = -1
        for _ in range(8):
            with program(TRAINER, folder) as trainer:
                said = int(trainer.stdout.readline())
                time.sleep(rng.random() * 0.1)
                trainer.kill()
                said = max([said, *(int(line) for line in trainer.stdout.read().split())])
            check()
            checkpointer = deepnvme.Checkpointer(folder)
            latest = checkpointer.latest()
            assert latest is not None
            assert max(last, said - 2) <= latest.step <= said + 1
            last = latest.step
            assert checkpointer.restore(verify="full")["a"][0] == last
            check()
        with deepnvme.Checkpointer(folder, keep=1) as checkpointer:
            checkpointer.save(last + 1, state_of(last + 1))
        check()
    ours = {"manifest.json", checkpointer.checkpoints[0].path.name}
    assert {path.name for path in folder.iterdir()} == {*FOREIGN, *FOREIGN_FOLDERS, *ours}


def test_a_reader_finds_a_checkpoint_while_another_process_saves(tmp_path: Path) -> None:
    save_all(tmp_path, 0)
    over = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        checkpointer = deepnvme.Checkpointer(tmp_path)
        with suppress(BaseException):
            while not over.is_set():
                try:
                    found = checkpointer.restore(verify="full")
                    assert_same(found, state_of(found["step"]))
                    assert deepnvme.Checkpointer(tmp_path).latest() is not None
                except BaseException as error:  # noqa: PERF203
                    failures.append(error)
                    raise

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        with deepnvme.Checkpointer(tmp_path, keep=1, durability="none") as checkpointer:
            for step in range(1, 25):
                checkpointer.save(step, state_of(step))
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert not failures


def test_a_reader_sees_what_is_saved_after_it_was_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reader = deepnvme.Checkpointer(folder)
    assert reader.latest() is None
    with deepnvme.Checkpointer(folder, keep=1) as writer:
        for step in (1, 2):
            writer.save(step, {"a": torch.full((3,), float(step))})
            assert [entry.step for entry in reader.checkpoints] == [step]
            found = reader.latest()
            assert found is not None
            assert found.step == step
            assert reader.restore()["a"].eq(step).all()
            assert reader.restore(step)["a"].eq(step).all()


def test_a_listed_checkpoint_that_is_away_is_said_and_stays_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_all(folder, 0, 1, 2, 3)
    away = {step: folder / f"step-{step:08}.pt" for step in (2, 3)}
    for step, path in away.items():
        path.rename(tmp_path / str(step))
    with pytest.warns(UserWarning, match=r"lists step-00000002\.pt, step-00000003\.pt, which is missing"):
        checkpointer = deepnvme.Checkpointer(folder, keep=5)
    assert [entry.step for entry in checkpointer.checkpoints] == [0, 1]
    with pytest.raises(FileNotFoundError, match="the manifest lists step 2, and this file is missing") as caught:
        checkpointer.restore(2)
    assert caught.value.filename == str(away[2])
    assert checkpointer.restore()["step"] == 1
    checkpointer.save(4, state_of(4))
    checkpointer.close()
    # Forgotten, and not retired: files that come back are nobody's, and nobody removes them.
    for step, path in away.items():
        (tmp_path / str(step)).rename(path)
    with pytest.warns(UserWarning, match="not in the manifest"), deepnvme.Checkpointer(folder, keep=2) as checkpointer:
        checkpointer.save(5, state_of(5))
        assert [entry.step for entry in checkpointer.checkpoints] == [4, 5]
    for step, path in away.items():
        assert_same(deepnvme.load(path, verify="full"), state_of(step))


def test_one_that_is_back_before_the_next_save_counts(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_all(folder, 0, 1)
    path = folder / "step-00000001.pt"
    path.rename(tmp_path / "away")
    with pytest.warns(UserWarning, match="put it back"):
        checkpointer = deepnvme.Checkpointer(folder, keep=None)
    (tmp_path / "away").rename(path)
    assert checkpointer.restore()["step"] == 1
    checkpointer.save(2, state_of(2))
    assert [entry.step for entry in checkpointer.checkpoints] == [0, 1, 2]
    checkpointer.close()


def test_a_manifest_that_somebody_puts_there_meanwhile_stays(tmp_path: Path) -> None:
    save_all(tmp_path / "other", 7)
    folder = tmp_path / "c"
    checkpointer = deepnvme.Checkpointer(folder, keep=2)
    checkpointer.save(1, state_of(1))
    foreign = (tmp_path / "other" / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(foreign)
    with pytest.raises(errors.Error, match=r"manifest\.json.*changed while this Checkpointer had the folder"):
        checkpointer.save(2, state_of(2))
    with pytest.raises(errors.Error, match="changed while"):
        checkpointer.save(3, state_of(3))
    assert (folder / "manifest.json").read_bytes() == foreign
    checkpointer.close()
    assert_same(deepnvme.load(folder / "step-00000001.pt"), state_of(1))
