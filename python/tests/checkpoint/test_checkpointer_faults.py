"""A Checkpointer that is killed, fails or is interrupted at any point of a save leaves the old or the new state."""

from __future__ import annotations

import datetime as dt
import errno
import signal
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import deepnvme
from deepnvme._checkpoint.background_save import BackgroundSaves
from deepnvme._checkpoint.save_start import SaveStarter
from programs import program, status_of

from .states import assert_same


def state_of(number: int) -> dict[str, Any]:
    return {"a": torch.full((300_000,), number), "number": number}


def number_in(folder: Path) -> int:
    """Return the number of the newest checkpoint, and compare all its bytes."""
    number = deepnvme.Checkpointer(folder).restore(verify="full")["number"]
    assert_same(deepnvme.Checkpointer(folder).restore(), state_of(number))
    return int(number)


# The steps of a save once its file is on disk, in order. The process is stopped before and after each.
INSTANTS = [("publish", "before"), ("publish", "after"), ("settle", "before"), ("settle", "after")]

# The steps one by one, as several processes do them, so that each can be stopped.
STEPS = """
import os, signal, sys, torch, deepnvme
from deepnvme._checkpoint import checkpoint, history
def commit(self, step, path, saved, new, begun):
    new.take_mode()
    die_at("publish", "before")
    entry = checkpoint.encode_entry(checkpoint.new_checkpoint(step, path, saved), {path.name: new.temporary.name})
    self._native.publish(entry)
    die_at("publish", "after")
    new.keep()
    die_at("settle", "before")
    self._warn_about(self._native.settle())
    die_at("settle", "after")
history.History._commit_single = commit
"""
KILLED = (
    STEPS
    + """
folder, function, when, step = sys.argv[1:]
def die_at(*instant):
    if instant == (function, when):
        os.kill(os.getpid(), signal.SIGKILL)
checkpointer = deepnvme.Checkpointer(folder, keep=2)
checkpointer.save(int(step), {"a": torch.full((300_000,), 9), "number": 9})
"""
)


@pytest.mark.parametrize(("function", "when"), INSTANTS)
@pytest.mark.parametrize("step", [5, 6])
def test_killed_at_each_instant(tmp_path: Path, function: str, when: str, step: int) -> None:
    with deepnvme.Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(5, state_of(1))
    assert status_of(KILLED, tmp_path, function, when, step) == -signal.SIGKILL
    is_old = (function, when) == ("publish", "before")
    assert number_in(tmp_path) == (1 if is_old else 9)
    with deepnvme.Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(step, state_of(10))
    assert number_in(tmp_path) == 10
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"manifest.json", *(checkpoint.path.name for checkpoint in checkpointer.checkpoints)}


def test_a_name_taken_after_a_killed_save(tmp_path: Path) -> None:
    with deepnvme.Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(5, state_of(1))
    assert status_of(KILLED, tmp_path, "publish", "after", 6) == -signal.SIGKILL
    theirs = tmp_path / "step-00000006.pt"
    theirs.write_bytes(b"mine")
    assert number_in(tmp_path) == 9
    with deepnvme.Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(7, state_of(10))
    assert number_in(tmp_path) == 10
    assert theirs.read_bytes() == b"mine"


@pytest.mark.parametrize("async_", [False, True])
def test_a_folder_that_is_not_writable(tmp_path: Path, async_: bool) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path / "c", async_=async_)
    checkpointer.save(5, state_of(1))
    checkpointer.wait()
    for number in (2, 3):
        # A folder has the manifest's name, and is not replaced.
        (tmp_path / "c" / "manifest.json").rename(tmp_path / "manifest.json")
        (tmp_path / "c" / "manifest.json").mkdir()
        with pytest.raises(deepnvme.errors.CorruptFileError):
            checkpointer.save(5, state_of(number))
            checkpointer.wait()
        (tmp_path / "c" / "manifest.json").rmdir()
        (tmp_path / "manifest.json").rename(tmp_path / "c" / "manifest.json")
        assert number_in(tmp_path / "c") == 1
    checkpointer.save(5, state_of(4))
    assert checkpointer.restore()["number"] == number_in(tmp_path / "c") == 4
    checkpointer.close()
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        "manifest.json",
        checkpointer.checkpoints[0].path.name,
    }


def test_a_step_saved_again_has_a_name_of_its_own(tmp_path: Path) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path)
    for number in range(4):
        checkpointer.save(5, state_of(number))
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.path.name == ("step-00000005-1.pt" if number % 2 else "step-00000005.pt")
        assert list(tmp_path.glob("step*")) == [latest.path]
        assert number_in(tmp_path) == number


LEAVING = """
import os, signal, sys, torch, deepnvme
from deepnvme._deepnvme import _NewFile
new = _NewFile(os.path.join(sys.argv[1], sys.argv[2]), 100, None)
print(new.temporary.name, flush=True)
signal.pause()
"""


def test_remains_of_a_killed_save_of_another_step_are_removed(tmp_path: Path) -> None:
    names = []
    for name in ("step-00000003.pt", "model.pt"):
        with program(LEAVING, tmp_path, name) as saver:
            names.append(saver.stdout.readline().strip())
            with deepnvme.Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(6, state_of(1))
            assert (tmp_path / names[-1]).exists(), "it is being written"
            saver.kill()
    # A copy of it, and a file under an unused private name, are foreign files.
    others = [tmp_path / (names[0][:-1] + "z"), tmp_path / ".step-00000003.pt.deepnvme-tmp-1-0"]
    for other in others:
        other.write_bytes(bytes(100))
    with deepnvme.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state_of(1))
    assert not (tmp_path / names[0]).exists()
    assert (tmp_path / names[1]).exists(), "that is not a checkpoint of this folder"
    assert all(other.exists() for other in others)


def test_a_save_that_did_not_start_is_not_counted(tmp_path: Path) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path, every=dt.timedelta(hours=1))
    with pytest.raises(TypeError):
        checkpointer.save(1, {"a": (_ for _ in ())})
    assert checkpointer.save(2, state_of(2)), "the hour begins with a save, not with a try"
    assert not checkpointer.save(3, state_of(3))


def test_an_interrupted_wait_keeps_the_optimizer_from_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.detach().clone()

    def interrupted(_: BackgroundSaves) -> None:
        raise KeyboardInterrupt

    checkpointer = deepnvme.Checkpointer(tmp_path)
    with checkpointer.overlap(optimizer):
        checkpointer.save(1, {"model": model.state_dict()})
        with monkeypatch.context() as patched:
            patched.setattr(BackgroundSaves, "holds_tensors", property(lambda _: True))
            patched.setattr(BackgroundSaves, "wait_all_read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert torch.equal(model.weight, before)
        optimizer.step()
    assert torch.equal(checkpointer.restore()["model"]["weight"], before)


class Endless:
    """A save that ends when it is stopped, and whose copying is interrupted."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def wait_filled(self) -> None:
        raise KeyboardInterrupt

    def wait(self, *_: object) -> tuple[int, int, int, int]:
        assert self.stopped.wait(60)
        raise InterruptedError

    def stop(self) -> None:
        self.stopped.set()


def test_an_interrupted_copy_abandons_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path, async_=True)
    checkpointer.save(1, state_of(1))
    with monkeypatch.context() as patched:
        patched.setattr(SaveStarter, "_start", lambda *_: Endless())
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(2, state_of(2))
    assert number_in(tmp_path) == 1
    checkpointer.save(3, state_of(3))
    checkpointer.close()
    assert number_in(tmp_path) == 3


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_no_thread_for_a_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    state = {"a": torch.randn(1000)}

    def refuse(_: threading.Thread) -> None:
        # Meanwhile the file is written completely.
        time.sleep(seconds)
        raise RuntimeError("can't start new thread")

    with deepnvme.Checkpointer(tmp_path, async_=True) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(deepnvme.Error, match="ulimit -u") as refused:
                checkpointer.save(1, state)
        assert refused.value.errno == errno.EAGAIN
        assert checkpointer.checkpoints == []
        checkpointer.save(2, state)
    assert torch.equal(deepnvme.Checkpointer(tmp_path).restore()["a"], state["a"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "step-00000002.pt"]


@pytest.mark.parametrize("format_", ["pt", "safetensors"])
def test_an_interrupt_after_the_last_byte_leaves_no_file(tmp_path: Path, format_: Literal["pt", "safetensors"]) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with deepnvme.Checkpointer(tmp_path, progress=interrupt, format=format_) as checkpointer:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            checkpointer.save(1, {"a": torch.randn(1000)})
        assert [path for path in tmp_path.iterdir() if "step" in path.name] == []
    assert interrupted.value is not None


def test_a_name_that_is_released_twice_stays_with_its_new_save(tmp_path: Path) -> None:
    """Both the commit and the save that it belongs to release the name of a save that fails."""
    with deepnvme.Checkpointer(tmp_path) as checkpointer:
        history = checkpointer._history
        failed = history.reserve(1, ".pt")
        history.release_name(failed)
        running = history.reserve(1, ".pt")
        history.release_name(failed)
        assert (running, history.reserve(1, ".pt").name) == (failed, "step-00000001-1.pt")
        history.release_name(running)
        assert history.reserve(1, ".pt") == running


def test_a_damaged_manifest_leaves_no_file_of_a_refused_save(tmp_path: Path) -> None:
    with deepnvme.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.randn(1000)})
        before = {path.name for path in tmp_path.iterdir()}
        (tmp_path / "manifest.json").write_text("{}")
        for step in (2, 3):
            with pytest.raises(deepnvme.errors.CorruptFileError):
                checkpointer.save(step, {"a": torch.randn(1000)})
        assert {path.name for path in tmp_path.iterdir()} == before


def test_a_lock_that_was_cut_short_goes(tmp_path: Path) -> None:
    text = """
import resource, signal, sys, torch, deepnvme
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
for nbytes in (0, 1, 40, 80, 120):
    checkpointer = deepnvme.Checkpointer(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limit[1]))
    try:
        checkpointer.save(1, {"a": torch.ones(1000)})
    except (OSError, deepnvme.Error):
        pass
    else:
        sys.exit(f"{nbytes} bytes were enough")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        checkpointer.close()
with deepnvme.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(2, {"a": torch.ones(3)})
"""
    assert status_of(text, tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "step-00000002.pt"}
