"""The standard error: where progress is shown, if there is one."""

from __future__ import annotations

import contextlib
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
