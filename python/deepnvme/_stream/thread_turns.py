"""Let threads that run one model take turns if memory does not suffice for all."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from deepnvme._utils.fork_locks import make_lock
from deepnvme.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

# Waiting threads poll at this interval even if nobody wakes them.
_POLL_S = 0.05
# A thread that has waited this long goes next; until then others may overtake it.
_STARVATION_S = 0.5


class ThreadTurns:
    """Tracks which threads hold weights, so that a thread without memory knows whether waiting helps.

    A thread that already holds weights always continues, since the waiting ones need them back. A thread that holds
    none gives way to a starved one.

    Args:
        check: raises if the model is closed, so that no thread waits for memory of a closed model.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._changed = threading.Condition(make_lock())
        # Threads that hold weights or are about to, and the depth of their nested calls.
        self._call_depth: dict[int, int] = {}
        self._next: int | None = None
        self._releases = 0

    def acquire(self, held: list[Any], take: Callable[[Any], Any], group: Any) -> None:
        """Append ``take(group)`` to ``held`` once memory is free. The caller calls ``release`` in any case.

        Raises:
            MemoryError: there is not enough memory, and no other thread holds anything that it could release.
            ClosedError: the model was closed.
        """
        me = threading.get_ident()
        began = time.monotonic()
        with self._changed:
            # Counted before waiting, so that ``release`` finds it. A thread without weights leaves the count while it
            # lets a starved one go first.
            self._call_depth[me] = self._call_depth.get(me, 0) + 1
        try:
            while not held:
                self._check()
                releases_seen = self._yield_to_starved(me)
                try:
                    # `map` runs no bytecode between the call and the append, where Ctrl-C could come. So the list
                    # always holds what was acquired.
                    held.extend(map(take, (group,)))
                except MemoryError:
                    if not self._wait_for_release(me, releases_seen, began):
                        raise
                except ClosedError:
                    # The streamer was closed while it waited. This error names the model.
                    self._check()
                    raise
        finally:
            with self._changed:
                if self._next == me:
                    self._next = None
                    self._changed.notify_all()

    def _yield_to_starved(self, me: int) -> int:
        """Let a starved thread go first, unless this thread may hold weights.

        Returns:
            The number of releases so far.
        """
        with self._changed:
            if self._call_depth[me] == 1 and self._next not in {None, me}:
                del self._call_depth[me]
                try:
                    while self._next not in {None, me}:
                        self._changed.wait(_POLL_S)
                finally:
                    self._call_depth[me] = 1
            return self._releases

    def _wait_for_release(self, me: int, releases_seen: int, began: float) -> bool:
        """Wait until another thread may have released something. Return false if no other thread holds anything."""
        with self._changed:
            if self._releases == releases_seen:
                if self._call_depth.keys() == {me}:
                    return False
                if self._next is None and time.monotonic() - began > _STARVATION_S:
                    self._next = me
                self._changed.wait(_POLL_S)
            return True

    def release(self) -> None:
        """Wake waiting threads: this thread has released its most recent acquisition."""
        me = threading.get_ident()
        with self._changed:
            if self._call_depth.get(me, 0) > 1:
                self._call_depth[me] -= 1
            else:
                self._call_depth.pop(me, None)
            self._releases += 1
            self._changed.notify_all()
