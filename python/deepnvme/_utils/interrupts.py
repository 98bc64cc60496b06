"""Calls that signal handlers and forks interrupt: exceptions of handlers, and locks that are free afterwards.

A handler may raise any exception, in the middle of any call. Code that turns failures of its own calls into other
errors, or goes on after them, must let those of a handler through.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from deepnvme._utils.end_watch import EndWatch

if TYPE_CHECKING:
    from types import CodeType

_locks: EndWatch[None] = EndWatch(forgets=True)
# Interval in seconds at which waiting threads check for Ctrl-C, which may have stopped the call that should wake them.
POLL_INTERVAL_S = 0.05


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler of this process, as it is installed now, has raised an exception."""
    codes = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    traceback = error.__traceback__ if codes else None
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a handler that is written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    # Of an object that is called: a method of its class.
    classes = type(handler).__mro__
    called = next((vars(one)["__call__"] for one in classes if "__call__" in vars(one)), None)
    for found in (handler, getattr(handler, "__func__", None), called):
        if (code := getattr(found, "__code__", None)) is not None:
            return code  # type: ignore[no-any-return]
    return None


def make_lock() -> threading.RLock:
    """Make a re-entrant lock.

    A child has only the thread that forked. A lock that another thread held would stay held there for ever, so
    each is free in the child, unless the thread that forked holds it.
    """
    lock = threading.RLock()
    _locks.watch(lock, None)
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
    for lock in _locks.living():
        if not lock._is_owned():  # noqa: SLF001 - as `threading` does for its own locks
            lock._at_fork_reinit()  # noqa: SLF001


os.register_at_fork(after_in_child=_free_all)
