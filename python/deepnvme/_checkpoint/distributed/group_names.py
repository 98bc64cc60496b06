"""Names of process groups that depend on nothing but their ranks.

torch names a group after the number of groups that this process has made. Processes that made different numbers of
groups before wait for each other under different names. So our groups get names of their own, and torch does not count
them: later groups of others have equal names everywhere.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

# Of `torch.distributed` as it is initialised now: how often each set of ranks has made a group.
_made: Counter[tuple[int, ...]] = Counter()
_world: weakref.ref[Any] | None = None
# The name that the next group of this thread gets.
_of_thread = threading.local()


def own_name(ranks: Sequence[int]) -> AbstractContextManager[object] | None:
    """Return a block in which torch gives one group of these ranks a name of its own, or ``None`` if it cannot.

    All of these ranks call this in the same order.
    """
    import torch.distributed.distributed_c10d as c10d  # noqa: PLC0415

    # Earlier versions of torch take the number of groups that exist, which this cannot replace.
    if "group_count" not in c10d._hash_ranks_to_str.__code__.co_names:  # noqa: SLF001
        return None
    return _OwnName(c10d._world, f"deepnvme.{_next_number(ranks)}")  # noqa: SLF001


def _next_number(ranks: Sequence[int]) -> int:
    global _world  # noqa: PLW0603
    import torch.distributed as dist  # noqa: PLC0415

    world = dist.group.WORLD
    if _world is None or _world() is not world:
        _made.clear()
        _world = weakref.ref(world)
    key = tuple(sorted(ranks))
    _made[key] += 1
    return _made[key]


class _OwnName:
    def __init__(self, world: Any, name: str) -> None:
        self._world = world
        self._name = name

    def __enter__(self) -> None:
        # It stays there, and counts for all other groups.
        if not isinstance(self._world.group_count, _Count):
            self._world.group_count = _Count(self._world.group_count)
        _of_thread.name = self._name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _of_thread.name = None


class _Count(int):
    """torch's count of groups. In a thread that has a name for a group, it reads as that name, and does not grow."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the text from which torch makes the name of a group."""
        name: str | None = getattr(_of_thread, "name", None)
        return super().__str__() if name is None else name

    def __add__(self, other: int) -> int:
        """Count a group, except in a thread that has a name for it."""
        return _Count(int(self) + (other if getattr(_of_thread, "name", None) is None else 0))
