"""Threads that run one model at the same time take turns where there is not memory for all of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Who waits looks again after this, also where nobody wakes it: seconds.
_LOOK_AGAIN_S = 0.05


class Turns:
    """Knows which threads have weights, so that who finds no room can tell whether waiting helps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()
        self._ends = 0

    def get(self, held: list[Any], acquire: Callable[[Any], Any], what: Any) -> None:
        """Append what ``acquire`` returns to ``held``, once there is room for it.

        Raises:
            MemoryError: there is none, and no other thread has anything that it could give back.
        """
        me = threading.get_ident()
        while not held:
            with self._changed:
                self._inside.add(me)
                ends = self._ends
            try:
                # Without a bytecode in between, at which Ctrl-C could come: what was acquired is always in the list.
                held.extend(map(acquire, (what,)))
            except MemoryError:
                with self._changed:
                    if self._ends == ends:
                        if self._inside == {me}:
                            raise
                        self._changed.wait(_LOOK_AGAIN_S)

    def end(self) -> None:
        """Tell those who wait that this thread has given back what it had."""
        with self._changed:
            self._inside.discard(threading.get_ident())
            self._ends += 1
            self._changed.notify_all()
