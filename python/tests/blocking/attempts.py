"""Judge whether a program's call ends in time."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from .limits import LATE_MAX, LIMIT_S, TIMED_OUT_STATUS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .fork_server import ForkServer

# The message of a thread that Python ends inside a function of torch. Threads inside our functions do not abort.
ABORTED_BY_TORCH = "terminate called without an active exception"


class Attempts:
    """Runs a program, and again if it was late.

    A call that is in time at once passes. One that was late has to be in time more often than not.

    Args:
        server: runs the program.
        folder: gets a folder for each attempt.
        measures_exit: whether the end of the process counts, and not only that of the package's exit handlers. Python
            unloads torch after those, which takes long.
    """

    def __init__(self, server: ForkServer, folder: Path, *, measures_exit: bool) -> None:
        self._server, self._folder, self._measures_exit = server, folder, measures_exit
        self.late: list[str] = []

    def until_judged(self, program: str, *, is_exit: bool) -> Iterator[Path]:
        """Yield the folder of each attempt that was in time."""
        in_time = 0
        while in_time <= len(self.late):
            folder = self._folder / str(in_time + len(self.late))
            folder.mkdir()
            if self._is_in_time(folder, program, is_exit=is_exit):
                in_time += 1
                yield folder
            elif len(self.late) > LATE_MAX:
                pytest.fail(
                    f"longer than {LIMIT_S} s, {len(self.late)} times of {in_time + len(self.late)}: {self.late}"
                )

    def _is_in_time(self, folder: Path, program: str, *, is_exit: bool) -> bool:
        status, ended = self._server.run(folder, program)
        output = (folder / "output").read_text()
        if status == TIMED_OUT_STATUS:
            self.late.append(output)
            return False
        if is_exit and status == -signal.SIGABRT and ABORTED_BY_TORCH in output:
            status = 0
        assert status == 0, f"status {status}\n{output}"
        if is_exit:
            # Threads that end meanwhile may write on the same line.
            ((began, checked, delayed),) = re.findall(r"<exit (\S+) (\S+) (\S+)>", output)
            took = (ended if self._measures_exit else float(checked)) - float(began)
            if took - float(delayed) > LIMIT_S:
                self.late.append(f"{took} s, of which {delayed} without a CPU")
                return False
        return True
