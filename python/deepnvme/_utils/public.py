"""What users see of the package: the module of public objects, the line that a warning names, short lists."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
# Frames between a warning and the user's code: decorators of the package are made by contextlib.
_OURS = ("deepnvme", "contextlib")
# How many names a message lists.
_LISTED_MAX = 8


def public(thing: _T) -> _T:
    """Make a function or class say that it belongs to ``deepnvme``, in its text, in help, tracebacks and pickles."""
    return public_in("deepnvme")(thing)


def public_in(module: str) -> Callable[[_T], _T]:
    """Make a function or class say that it belongs to a public module."""

    def mark(thing: _T) -> _T:
        thing.__module__ = module
        return thing

    return mark


def warn_caller(message: str) -> None:
    """Warn with the line of the user's code that called the package."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def first_of(names: Sequence[object]) -> str:
    """List names, or the first of many: a file may have any number of them."""
    more = len(names) - _LISTED_MAX
    return ", ".join(map(str, names[:_LISTED_MAX])) + (f" and {more} more" if more > 0 else "")
