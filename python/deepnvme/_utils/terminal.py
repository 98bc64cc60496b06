"""The standard error, where progress is shown if there is one, and the standard output of commands."""

from __future__ import annotations

import contextlib
import errno
import os
import sys


def is_terminal() -> bool:
    """Whether the standard error is a terminal. A process may have none, or may have closed it."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (OSError, ValueError):
        return False


def show(text: str) -> None:
    """Write to the standard error, as far as it takes that: no work fails because nobody can watch it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


class OutputError(Exception):
    """The standard output takes no more."""

    def __init__(self, number: int) -> None:
        super().__init__(f"cannot write to standard output: {os.strerror(number)} (os error {number})")


def say(line: str) -> None:
    """Write a line of a command's answer to the standard output, now.

    Raises:
        BrokenPipeError: its reader has gone.
        OutputError: it is closed, or the disk behind it is full.
    """
    if sys.stdout is None:
        raise OutputError(errno.EBADF)
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is left in its buffer would fail again when the interpreter ends.
        sys.stdout = None
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(error.errno or errno.EIO) from error
