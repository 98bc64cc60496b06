"""A bar on the terminal for work that takes long, or a callback."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from deepnvme._utils.terminal import is_terminal, show

# What the argument `progress` may be: nothing said, yes or no, or who wants to know (bytes done, bytes in all).
Progress: TypeAlias = bool | Callable[[int, int], object] | None

# Work that is over by then shows nothing.
_QUIET_S = 1.0
_WIDTH = 30


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
        show(f"\r{self._text} [{bar}] {done / 1e9:.1f}/{total / 1e9:.1f} GB, {rate:.1f} GB/s{end}")


def watcher(progress: Progress, verb: str, name: object) -> Callable[[int, int], object] | None:
    """Say who is to be told how far the work is."""
    if callable(progress):
        return progress
    if progress or (progress is None and is_terminal()):
        return _Bar(verb, name, bool(progress))
    return None
