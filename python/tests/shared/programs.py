"""Programs that a test reads from, interrupts or kills, in forks of a process that has imported torch."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forked_python import with_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# A hanging program is killed, which also ends its output and the test that reads it.
_PATIENCE_S = 100


class Program:
    """A faster equivalent of ``python -c code arguments``.

    Args:
        code: the program.
        *arguments: its arguments.
        folder: its current folder. Default: this process's.

    Attributes:
        stdout: its output, while it runs.
        errors: its output to stderr, once it has been waited for.
    """

    def __init__(self, code: str, *arguments: object, folder: Path | None = None) -> None:
        self._server = with_torch()
        self._status: int | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.errors = ""
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading, encoding="utf-8")
        try:
            self._pid = self._server.start(
                code,
                *map(str, arguments),
                folder=folder or Path.cwd(),
                environment=dict(os.environ),
                stdout=writing,
                stderr=self._stderr.fileno(),
                seconds=_PATIENCE_S,
            )
        finally:
            os.close(writing)

    @property
    def is_running(self) -> bool:
        """Whether it is still running."""
        return self._status is None and self._server.is_running(self._pid)

    def kill(self) -> None:
        """Kill it immediately, like ``kill -9``."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.kill(self._pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until it ends, and set ``errors``. Returns its exit status, negative for a signal."""
        if self._status is None:
            self._status = self._server.wait(self._pid).status
            with self._stderr as file:
                file.seek(0)
                self.errors = file.read().decode()
            # Pytest shows it if the test fails.
            sys.stderr.write(self.errors)
        assert self._status != -signal.SIGALRM, "it hangs"
        return self._status


@contextmanager
def program(code: str, *arguments: object, folder: Path | None = None) -> Iterator[Program]:
    """Run a program during a block, and wait for its end."""
    started = Program(code, *arguments, folder=folder)
    try:
        yield started
    except BaseException:
        started.kill()
        raise
    finally:
        started.stdout.close()
        started.wait()


def status_of(code: str, *arguments: object) -> int:
    """Run a program. Returns its exit status."""
    with program(code, *arguments) as started:
        started.stdout.read()
        return started.wait()


def output_of(code: str, *arguments: object, folder: Path | None = None) -> str:
    """Run a program that has to succeed. Returns its output."""
    with program(code, *arguments, folder=folder) as started:
        output = started.stdout.read()
        assert started.wait() == 0, f"{output}\n{started.errors}"
    return output
