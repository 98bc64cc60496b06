"""An event for threads and signal handlers."""

from __future__ import annotations

import threading

# Interval in seconds at which waiting threads check for Ctrl-C.
POLL_INTERVAL_S = 0.05


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
