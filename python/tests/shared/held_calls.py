"""Hold chosen system calls of this process until a thread of Python lets them go on, with a seccomp filter.

A thread that makes such a call while it holds the GIL, or a lock that the thread of Python needs, waits for ever.
The filter needs no root, and applies to all threads. Import what is needed first: the dynamic loader reads libraries
with the GIL held.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

from call_filter import answer_one, install

# Of x86-64.
TRANSFERS = {
    "pread64": 17, "pwrite64": 18, "preadv": 295, "pwritev": 296, "preadv2": 327, "pwritev2": 328,
    "copy_file_range": 326, "fsync": 74, "fdatasync": 75, "io_uring_enter": 426, "io_submit": 209,
}  # fmt: skip


# How long after a call its first system call may come.
_PATIENCE_S = 5.0


class HeldCalls:
    """A thread that is asked about each of these calls, and lets it go on.

    Args:
        calls: numbers of system calls.
    """

    def __init__(self, calls: tuple[int, ...] = tuple(TRANSFERS.values())) -> None:
        self.count = 0
        self.failures: list[str] = []
        self._probe: Callable[[], object] | None = None
        self._listener = install(calls)
        threading.Thread(target=self._answer, daemon=True).start()

    def during(self, call: Callable[[], object], probe: Callable[[], object]) -> None:
        """Make a call, and probe in another thread while the first system call of it is held."""
        self.count, self._probe = 0, probe
        call()
        # Some of them are made in the background.
        until = time.monotonic() + _PATIENCE_S
        while not self.count and time.monotonic() < until:
            time.sleep(0.001)
        assert self.count, "the call made none of these system calls"
        assert not self.failures, self.failures

    def _answer(self) -> None:
        while True:
            answer_one(self._listener, self._decide)

    def _decide(self, _argument: int) -> int:
        self.count += 1
        probe, self._probe = self._probe, None
        if probe is not None:
            try:
                probe()
            except BaseException:
                self.failures.append(traceback.format_exc())
        return 0
