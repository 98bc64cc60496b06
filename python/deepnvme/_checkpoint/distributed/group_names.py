"""Names of process groups that depend on nothing but their ranks.

torch names a group after the number of groups that this process has made. Processes that make different numbers of
groups wait for each other under different names. So groups of some ranks get names of their own, and torch does not
count them: later groups of all ranks keep equal names.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

# Of `torch.distributed` as it is initialised now: how often each set of ranks has made a group.
_made: Counter[tuple[int, ...]] = Counter()
_world: weakref.ref[Any] | None = None


def own_name(ranks: Sequence[int]) -> AbstractContextManager[object] | None:
    """Return a block in which torch gives one group of these ranks a name of its own, or ``None`` if it cannot.

    All of these ranks call this in the same order.
    """
    import torch.distributed.distributed_c10d as c10d  # noqa: PLC0415

    # Before torch 2.12, names of groups of some ranks depended on the number of groups that exist.
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
        self._world.group_count = _Uncounted(self._world.group_count, self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(self._world.group_count, _Uncounted):
            # torch named no group.
            self._world.group_count = int(self._world.group_count)


class _Uncounted(int):
    """Stands for torch's count of groups until the next group has its name, which does not count."""

    _text: str

    def __new__(cls, count: int, text: str) -> Self:
        """Remember the count, and the text that stands for it."""
        self = super().__new__(cls, count)
        self._text = text
        return self

    def __str__(self) -> str:
        """Return the text, from which torch makes the name."""
        return self._text

    def __add__(self, other: int) -> int:
        """Return the count as it was: torch adds one once the group has its name."""
        return int(self)
