"""Background saves and the ends of programs: Ctrl-C as the thread starts, exits, and errors that nothing raises."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import deepnvme
from deepnvme._checkpoint.background_save import BackgroundSaves

# Raises KeyboardInterrupt where `Thread.start` waits for the thread that it has started.
INTERRUPTED = """
    import sys, threading, torch, deepnvme

    folder, state = sys.argv[1], {"a": torch.arange(1000)}
    main = threading.main_thread()

    def profile(frame, event, argument):
        # Every instant of the call in turn, also inside of `threading`.
        global left
        left -= 1
        if left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    done = 0
    with deepnvme.Checkpointer(folder, async_=True, keep=2) as checkpointer:
        checkpointer.save(1, state)
        for instant in range(1, 2000, 7):
            left = instant
            try:
                sys.setprofile(profile)
                checkpointer.save(instant + 1, state)
                sys.setprofile(None)
                checkpointer.wait()
                done += 1
                if done == 3:
                    break
            except KeyboardInterrupt:
                sys.setprofile(None)
        checkpointer.save(5000, state)
    assert done == 3, "the loop reached the end of the call"
    assert torch.equal(deepnvme.Checkpointer(folder).restore()["a"], state["a"])
    assert deepnvme.Checkpointer(folder).latest().step == 5000
"""

AT_EXIT = """
    import atexit, sys, torch, deepnvme

    checkpointer = deepnvme.Checkpointer(sys.argv[1], async_=True)
    atexit.register(lambda: checkpointer.save(7, {"a": torch.arange(1000)}))
"""

FAILS = """
    import os, sys, torch, deepnvme

    checkpointer = deepnvme.Checkpointer(sys.argv[1], async_=True)
    checkpointer.save(1, {"a": torch.ones(16 << 20)})
    os.rename(sys.argv[1], sys.argv[1] + ".moved")
"""


def run(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_an_interrupt_while_a_save_begins_hangs_nothing(tmp_path: Path) -> None:
    run(INTERRUPTED, tmp_path / "run")


def test_a_save_in_an_exit_handler_is_there(tmp_path: Path) -> None:
    assert run(AT_EXIT, tmp_path / "run") == ""
    checkpointer = deepnvme.Checkpointer(tmp_path / "run")
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [7]


def test_an_error_that_nothing_raised_is_printed_at_the_end(tmp_path: Path) -> None:
    assert "a background save has failed, and no later call has raised its error: [Errno 2]" in run(
        FAILS, tmp_path / "run"
    )


@pytest.mark.parametrize("is_raised", [True, False])
def test_an_error_that_was_raised_is_not_printed(tmp_path: Path, is_raised: bool) -> None:
    program = FAILS + (
        "    try:\n        checkpointer.wait()\n    except OSError:\n        pass\n" if is_raised else ""
    )
    assert ("has failed" in run(program, tmp_path / "run")) is not is_raised


class Written:
    """A save whose bytes are in the file."""

    progress = (1, 1)

    def wait(self, progress: object, stop_on_signal: bool) -> tuple[int, int, int, int]:
        del progress, stop_on_signal
        return 1, 0, 0, 0

    def wait_filled(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def discard(self) -> None:
        pass


def test_a_save_whose_caller_ended_without_a_word_is_not_committed() -> None:
    # As a second Ctrl-C can leave it, in the middle of the handling of the first.
    saves, committed = BackgroundSaves(), []

    def commit(_: object, check_wanted: Callable[[], None]) -> None:
        check_wanted()
        committed.append(True)

    caller = threading.Thread(target=lambda: saves.start(Written(), commit, waits_for_caller=True))
    caller.start()
    caller.join()
    saves.wait()
    assert not committed
    assert not saves.is_running
