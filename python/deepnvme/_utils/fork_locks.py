"""Locks that no forked child finds held."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def make_lock() -> threading.RLock:
    """Make a re-entrant lock.

    A child has only the thread that forked. A lock that another thread held would stay held there for ever, so
    each is free in the child, unless the thread that forked holds it.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # noqa: SLF001 - as `threading` does for its own locks
            lock._at_fork_reinit()  # noqa: SLF001


os.register_at_fork(after_in_child=_free_all)
