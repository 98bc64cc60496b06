"""If one rank differs, fails, is killed or interrupted, all ranks report it, and the old checkpoint stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from ranks import KILLED, run

# Saves step 1 on all ranks, makes one fail in step 2, and returns the error of each.
TRY = """
options = {"layout": layout, "async_": async_}
checkpointer = Checkpointer(folder, **options)
checkpointer.save(1, state(1))
checkpointer.wait()
own, step = state(2), 2
exec(wrong)
try:
    checkpointer.save(step, own)
    checkpointer.wait()
except Exception as error:
    answer = [type(error).__name__, str(error)]
assert [c.step for c in checkpointer.checkpoints] == [1]
exec(again)
"""
# In the same processes, the next save succeeds.
AGAIN = """
same(checkpointer.restore(verify="full"), state(1))
checkpointer.save(3, state(3))
same(checkpointer.restore(3, verify="full"), state(3))
checkpointer.close()
"""


def go_wrong(folder: Path, wrong: str, world: int = 2, again: str = AGAIN, **options: object) -> list[Any]:
    values = {"layout": "file", "async_": False, **options}
    answers = run(TRY, world, folder, wrong=wrong, again=again, **values)
    assert all(answer == KILLED or isinstance(answer, list) for answer in answers), answers
    return answers


def steps(folder: Path) -> list[int]:
    """Return what a Checkpointer finds. All of it is complete, and nothing else exists."""
    checkpointer = deepnvme.Checkpointer(folder)
    for checkpoint in checkpointer.checkpoints:
        assert checkpointer.restore(checkpoint.step, verify="full")["step"] == checkpoint.step
    there = {path.name.partition(".pt")[0] for path in folder.iterdir()}
    found = [checkpoint.step for checkpoint in checkpointer.checkpoints]
    assert there == {"manifest.json", *(f"step-{step:08}" for step in found)}
    return found


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            "if rank == 1: own['model']['b'] = torch.ones(99)",
            "the state of rank 1 differs .*'model.b' is float32 .99. .* on rank 1, and float32 ",
        ),
        (
            "if rank == 1: del own['step'], own['optimizer']['state'][0]['m']",
            "rank 1 has 'optimizer.state.0.step' where rank 0 has 'optimizer",
        ),
        ("if rank == 1: own['model'] = dict(reversed(own['model'].items()))", "in the same order"),
        ("step += rank", "rank 1 on .* saves step 3, and rank 0 on .* step 2"),
    ],
)
def test_a_process_that_has_something_else(tmp_path: Path, wrong: str, text: str) -> None:
    folder = tmp_path / "c"
    answers = go_wrong(folder, wrong)
    assert answers[0] == answers[1]
    assert answers[0][0] == "InvalidArgumentError"
    assert re.search(text, answers[0][1])
    assert steps(folder) == [1, 3]


# A full disk for one rank at the first byte of its share, and for the leader, which creates the file.
LIMIT = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if rank == {rank}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
"""
LIFT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"


@pytest.mark.parametrize(("layout", "full", "async_"), [("file", 0, False), ("file", 1, True), ("parts", 1, False)])
def test_a_full_disk_of_one_process(tmp_path: Path, layout: str, full: int, async_: bool) -> None:
    folder = tmp_path / "c"
    answers = go_wrong(folder, LIMIT.format(rank=full), again=LIFT + AGAIN, layout=layout, async_=async_)
    assert answers[full][0] == "Error"
    assert "arge" in answers[full][1]
    assert answers[1 - full][0] == "PeerError"
    assert f"rank {full} on " in answers[1 - full][1]
    assert answers[full][1] in answers[1 - full][1]
    assert steps(folder) == [1, 3]


# Killed when a part of its shard is on disk, or when all is and the others have its checksums.
KILL = """
from deepnvme._checkpoint.distributed import save as distributed_save
whole = distributed_save.SharedSave.{function}
def die(saving, *arguments):
    def watch():
        while saving.progress[0] == 0:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch).start()
    whole(saving, *arguments)
    time.sleep(60)
if rank == {rank}:
    distributed_save.SharedSave.{function} = die
"""


@pytest.mark.parametrize(
    ("function", "rank", "layout"), [("_write", 1, "file"), ("_write", 0, "parts"), ("_finish_files", 2, "parts")]
)
def test_a_process_that_is_killed(tmp_path: Path, function: str, rank: int, layout: str) -> None:
    folder = tmp_path / "c"
    answers = go_wrong(folder, KILL.format(function=function, rank=rank), 4, again="", layout=layout)
    assert answers[rank] == KILLED
    others = [answer for number, answer in enumerate(answers) if number != rank]
    assert all(name == "PeerError" and "another process ended" in text for name, text in others), others
    checkpointer = deepnvme.Checkpointer(folder)
    assert checkpointer.restore(verify="full")["step"] == 1
    code = "with Checkpointer(folder) as c: answer = c.save(5, state(5))"
    assert run(code, 2, folder) == [True, True]
    assert steps(folder) == [1, 5]


# Killed when the manifest lists the new checkpoint, and before the files have their names.
PUBLISHED = """
from deepnvme._checkpoint.distributed import save as distributed_save
checkpointer = Checkpointer(folder, layout=layout)
checkpointer.save(1, state(1))
if rank == culprit:
    distributed_save.SharedSave.keep = lambda saving: os.kill(os.getpid(), signal.SIGKILL)
try:
    checkpointer.save(2, state(2))
except errors.PeerError as error:
    answer = str(error)
"""


@pytest.mark.parametrize(("culprit", "layout"), [(0, "file"), (1, "parts")])
def test_a_process_that_is_killed_when_the_new_one_counts(tmp_path: Path, culprit: int, layout: str) -> None:
    folder = tmp_path / "c"
    answers = run(PUBLISHED, 2, folder, culprit=culprit, layout=layout)
    assert answers[culprit] == KILLED
    assert "another process ended" in answers[1 - culprit]
    assert deepnvme.Checkpointer(folder).restore(verify="full")["step"] == 2
    assert run("with Checkpointer(folder) as c: answer = c.save(5, state(5))", 2, folder) == [True, True]
    assert steps(folder) == [1, 2, 5]


LEAVE = """
if rank == 1:
    checkpointer._group.leave("it was told to")
"""
CLOSED = """
try:
    checkpointer.save(4, own)
except errors.PeerError as error:
    assert "make a new one" in str(error), error
checkpointer.close()
with Checkpointer(folder) as checkpointer:
    checkpointer.save(3, state(3))
"""


def test_a_rank_that_left_says_so_and_a_new_checkpointer_works(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    answers = go_wrong(folder, LEAVE, 4, again=CLOSED)
    assert [name for name, _ in answers] == ["PeerError"] * 4
    assert steps(folder) == [1, 3]


SETTINGS = """
try:
    Checkpointer(folder, keep=3 + rank)
except ValueError as error:
    answer = str(error)
"""


def test_settings_that_differ(tmp_path: Path) -> None:
    (first, second) = run(SETTINGS, 2, tmp_path / "c")
    assert first == second
    assert "keep is 4 at rank 1" in first


INTERRUPTIBLE = """
checkpointer = Checkpointer(folder, async_=async_)
checkpointer.save(1, state(1))
checkpointer.wait()
saving = deepnvme._checkpoint.distributed.save.SharedSave
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
INTERRUPT = """
if rank == 1:
    write = saving._write
    def interrupted(self):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return write(self)
    saving._write = interrupted
try:
    checkpointer.save(2, state(2))
    checkpointer.wait()
except BaseException as error:
    answer = type(error).__name__
if rank == 1:
    saving._write = write
checkpointer.save(3, state(3))
checkpointer.close()
"""


@pytest.mark.parametrize("async_", [False, True])
def test_ctrl_c_in_one_process(tmp_path: Path, async_: bool) -> None:
    folder = tmp_path / "c"
    assert run(INTERRUPTIBLE + INTERRUPT, 2, folder, async_=async_) == ["PeerError", "KeyboardInterrupt"]
    assert steps(folder) == [1, 3]


INTERRUPT_BETWEEN = """
if rank == 1:
    finish = saving._finish
    saving._finish = lambda self, checksums: (time.sleep(1.5), finish(self, checksums))[1]
own = {"a": torch.arange(1000.0)}
checkpointer.save(2, own)
if rank == 1:
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
answer = []
for step in (3, 4, 5):
    try:
        checkpointer.save(step, own)
        checkpointer.wait()
        answer.append("saved")
    except BaseException as error:
        answer.append(type(error).__name__)
checkpointer.close()
"""


def test_ctrl_c_in_one_process_while_it_waits_for_its_previous_save(tmp_path: Path) -> None:
    # Exchanges of two threads would mix: gloo ends a process that gets a message of another length.
    other, interrupted = run(INTERRUPTIBLE + INTERRUPT_BETWEEN, 2, tmp_path / "c", async_=True)
    assert interrupted == ["KeyboardInterrupt", "PeerError", "PeerError"]
    assert other == ["PeerError"] * 3
    assert steps(tmp_path / "c") in ([1], [1, 2])


INTERRUPT_BEFORE_WAIT = """
background = checkpointer._background
if rank == 1:
    def interrupted(report):
        raise KeyboardInterrupt
    background.wait_with_progress = interrupted
try:
    checkpointer.save(2, state(2))
except BaseException as error:
    answer = type(error).__name__
if rank == 1:
    del background.wait_with_progress
checkpointer.save(3, state(3))
checkpointer.close()
"""


def test_ctrl_c_in_one_process_before_it_waits_for_its_save(tmp_path: Path) -> None:
    answers = run(INTERRUPTIBLE + INTERRUPT_BEFORE_WAIT, 2, tmp_path / "c", async_=False)
    assert answers == ["PeerError", "KeyboardInterrupt"]
    assert steps(tmp_path / "c") == [1, 3]


PROGRESS = """
def report(done, total):
    if rank == 1 and fails:
        raise KeyError("progress")
fails = False
checkpointer = Checkpointer(folder, progress=report)
checkpointer.save(1, state(1))
fails = True
try:
    checkpointer.save(2, state(2))
except BaseException as error:
    answer = type(error).__name__
left = sorted(path.name for path in folder.iterdir() if "step-00000002" in path.name)
fails = False
checkpointer.save(3, state(3))
checkpointer.close()
assert not left, left
"""


def test_a_progress_function_that_fails_on_one_rank_fails_the_save(tmp_path: Path) -> None:
    assert run(PROGRESS, 2, tmp_path / "c") == ["PeerError", "KeyError"]
    assert steps(tmp_path / "c") == [1, 3]


ALONE = """
deepnvme._checkpoint.distributed.process_group.TIMEOUT = datetime.timedelta(seconds=timeout)
if rank == 0:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if timeout > 10:
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    began = time.monotonic()
    try:
        Checkpointer(folder)
    except BaseException as error:
        answer = [type(error).__name__, time.monotonic() - began]
"""


@pytest.mark.parametrize(("timeout", "error"), [(1, "PeerError"), (60, "KeyboardInterrupt")])
def test_a_rank_that_makes_no_checkpointer(tmp_path: Path, timeout: int, error: str) -> None:
    (name, seconds), _ = run(ALONE, 2, tmp_path / "c", timeout=timeout)
    assert name == error
    assert seconds < 3
