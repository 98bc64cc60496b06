"""Output of commands: lines on standard output; progress bars, and errors as sentences, on standard error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from deepnvme.errors import Error, InvalidArgumentError

# The argument `progress`: yes, no, a function of bytes done and bytes in total, or `None` for a bar on a terminal.
ProgressArgument: TypeAlias = bool | Callable[[int, int], object] | None

# Shorter work shows no bar, unless the caller asked for one.
_QUIET_S = 1.0
_WIDTH = 30
_PATHS = ("model", "prompt_file", "folder", "trace", "source", "target")


def is_terminal() -> bool:
    """Whether standard error is a terminal. A process may have none, or may have closed it."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (OSError, ValueError):
        return False


def show(text: str) -> None:
    """Write to standard error, and ignore its errors: no work fails because its progress cannot be shown."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def printable(text: str) -> str:
    """Escape control characters: names in a file may move the cursor, or imitate our output."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class OutputError(Exception):
    """Standard output is closed or full."""

    def __init__(self, number: int) -> None:
        super().__init__(f"cannot write to standard output: {os.strerror(number)} (os error {number})")


def say(line: str) -> None:
    """Write a line of a command's output to standard output, and flush it.

    Raises:
        BrokenPipeError: its reader is gone.
        OutputError: it is closed, or its disk is full.
    """
    if sys.stdout is None:
        raise OutputError(errno.EBADF)
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Otherwise the interpreter would fail again at exit, with the rest of the buffer.
        sys.stdout = None
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(error.errno or errno.EIO) from error


class _Bar:
    def __init__(self, verb: str, name: object, is_asked_for: bool) -> None:
        self._text = f"{verb} {name}"
        self._began = time.monotonic()
        self._quiet_s = 0.0 if is_asked_for else _QUIET_S
        self._is_shown = False

    def __call__(self, done: int, total: int) -> None:
        seconds = time.monotonic() - self._began
        if total == 0 or (seconds < self._quiet_s and not self._is_shown):
            return
        self._is_shown = True
        filled = _WIDTH * done // total
        bar = "#" * filled + "-" * (_WIDTH - filled)
        rate = done / seconds / 1e9 if seconds > 0 else 0.0
        end = "\n" if done >= total else ""
        unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)  # noqa: PLR2004
        show(f"\r{self._text} [{bar}] {done / size:.1f}/{total / size:.1f} {unit}, {rate:.1f} GB/s{end}")


def progress_callback(progress: ProgressArgument, verb: str, name: object) -> Callable[[int, int], object] | None:
    """Return the function that reports progress: the caller's, a bar, or ``None``."""
    if callable(progress):
        return progress
    if progress not in (None, True, False):
        msg = f"progress is {progress!r}; it must be True, False, None, or a function of bytes done and bytes in total"
        raise TypeError(msg)
    if progress or (progress is None and is_terminal()):
        return _Bar(verb, name, bool(progress))
    return None


def report_errors(command: Callable[[dict[str, Any]], int], options: str) -> int:
    """Run a command with its options as JSON; the exit status: 0 success, 1 failure, 2 usage error."""
    parsed = {name: _path(value) if name in _PATHS else value for name, value in json.loads(options).items()}
    try:
        return command(parsed)
    except BrokenPipeError:
        # The reader has closed the pipe on purpose.
        return 0
    except ImportError as error:
        return _refused(f"{error}; install it: {sys.executable} -m pip install torch transformers", 1)
    except (Error, MemoryError, OSError, OutputError, ValueError) as error:
        # Errors of files, such as CorruptFileError, are also ValueErrors.
        is_usage = isinstance(error, InvalidArgumentError if isinstance(error, Error) else ValueError)
        return _refused(str(error), 2 if is_usage else 1)


def _path(value: Any) -> Any:
    """Decode a path. JSON carries paths that are not UTF-8 as lists of bytes."""
    return os.fsdecode(bytes(value)) if isinstance(value, list) else value


def _refused(text: str, status: int) -> int:
    lines = map(printable, text.split("\n"))
    show("deepnvme: " + "\n  ".join(lines) + "\n")
    return status
