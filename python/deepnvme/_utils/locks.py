"""Locks that no forked child finds held, and an event for which a signal handler may wait."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
# Interval in seconds at which waiting threads check for Ctrl-C, which may have stopped the call that should wake them.
POLL_INTERVAL_S = 0.05


def make_lock() -> threading.RLock:
    """Make a re-entrant lock.

    A child has only the thread that forked. A lock that another thread held would stay held there for ever, so
    each is free in the child, unless the thread that forked holds it.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class SignalSafeEvent:
    """An event that a signal handler may wait for, even if it interrupted a wait for the same event.

    ``threading.Event`` contains a lock that its waiter holds briefly. A handler that interrupts it there would wait
    forever.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake all waiters. Further calls do nothing."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait for at most this time. Returns whether the event is set."""
        if not self.is_set and self._lock.acquire(timeout=seconds):
            self._lock.release()
        return self.is_set


def _free_all() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # noqa: SLF001 - as `threading` does for its own locks
            lock._at_fork_reinit()  # noqa: SLF001


os.register_at_fork(after_in_child=_free_all)
