"""When a program's end began, and when the package's exit handlers have run.

Programs import this module before the package: its exit handler then runs after the package's.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Delays:
    """How long the threads of this process have been ready to run, but had no CPU."""

    def __init__(self) -> None:
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        found = {}
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            try:
                with open(f"/proc/self/task/{thread}/schedstat") as file:  # noqa: PTH123
                    found[thread] = int(file.read().split()[1]) / 1e9
            except (OSError, IndexError):  # noqa: PERF203
                # The thread has ended, or the kernel does not count.
                pass
        return found

    def seconds(self) -> float:
        """Return that of the thread that waited longest since."""
        return max((now - self._before.get(thread, 0) for thread, now in self._now().items()), default=0)


exit_checks: list[Callable[[], object]] = []
exit_began: list[tuple[float, Delays]] = []


@atexit.register
def end() -> None:
    """Run the checks, and print the times of the event and of the end."""
    for check in exit_checks:
        check()
    for began, delays in exit_began:
        print(f"<exit {began} {time.time()} {delays.seconds()}>", flush=True)  # noqa: T201
