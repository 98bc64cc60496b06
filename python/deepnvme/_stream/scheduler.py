"""Threads that run one model at the same time take turns where there is not memory for all of them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Who waits looks again after this, also where nobody wakes it: seconds.
_POLL_S = 0.05
# Who has waited so long is next: until then, others may be quicker again and again.
_STARVATION_S = 0.5


class FairScheduler:
    """Knows which threads have weights, so that who finds no room can tell whether waiting helps.

    Who has weights already goes on in any case, for those who wait need them back; who has none lets somebody go first
    who has waited for long.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Those that have weights or are about to, and in how many calls inside of each other.
        self._call_depth: dict[int, int] = {}
        self._next: int | None = None
        self._releases = 0

    def acquire(self, held: list[Any], acquire: Callable[[Any], Any], what: Any) -> None:
        """Append what ``acquire`` returns to ``held``, once there is room for it; ``end`` is called in any case.

        Raises:
            MemoryError: there is none, and no other thread has anything that it could give back.
        """
        me = threading.get_ident()
        began = time.monotonic()
        with self._changed:
            # Counted before it waits, so that ``end`` finds it; without weights, it is in nobody's way.
            self._call_depth[me] = self._call_depth.get(me, 0) + 1
        try:
            while not held:
                ends = self._wait_for_starved(me)
                try:
                    # With no bytecode in between, at which Ctrl-C could come: what was acquired is always in the list.
                    held.extend(map(acquire, (what,)))
                except MemoryError:
                    if not self._wait_for_room(me, ends, began):
                        raise
        finally:
            with self._changed:
                if self._next == me:
                    self._next = None
                    self._changed.notify_all()

    def _wait_for_starved(self, me: int) -> int:
        """Let go first who has waited for long, but for what this thread may have; how many ends there were."""
        with self._changed:
            if self._call_depth[me] == 1 and self._next not in {None, me}:
                del self._call_depth[me]
                try:
                    while self._next not in {None, me}:
                        self._changed.wait(_POLL_S)
                finally:
                    self._call_depth[me] = 1
            return self._releases

    def _wait_for_room(self, me: int, ends: int, began: float) -> bool:
        """Wait until somebody may have given something back; false where nobody has anything."""
        with self._changed:
            if self._releases == ends:
                if self._call_depth.keys() == {me}:
                    return False
                if self._next is None and time.monotonic() - began > _STARVATION_S:
                    self._next = me
                self._changed.wait(_POLL_S)
            return True

    def release(self) -> None:
        """Tell those who wait that this thread has given back what it had last."""
        me = threading.get_ident()
        with self._changed:
            if self._call_depth.get(me, 0) > 1:
                self._call_depth[me] -= 1
            else:
                self._call_depth.pop(me, None)
            self._releases += 1
            self._changed.notify_all()
