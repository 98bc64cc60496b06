"""Memory that is used again as soon as nobody has tensors in it.

Memory that a process has not had before costs more than reading into it does: the kernel fills it with zeros, and on
a virtual machine the host may have to find it first.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deepnvme._checkpoint.load_buffer import allocate

PAGE_BYTES = 4096


@dataclass(frozen=True)
class _Allocation:
    nbytes: int
    buffer: Any
    start: int


@dataclass
class PoolBuffer:
    """Memory that is lent: in use as long as this or a tensor in it is."""

    nbytes: int
    view: memoryview
    start: int
    used_bytes: int = 0

    def allocate_part(self, nbytes: int) -> tuple[Any, int]:
        """Give a part that begins at a page, as ``arena.allocate`` does; memory of its own where nothing is left."""
        begin = self.used_bytes
        if begin + nbytes > self.nbytes:
            return allocate(nbytes)
        self.used_bytes = begin + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return self.view, self.start + begin


@dataclass
class BufferPool:
    """Blocks that are lent again and again.

    At most ``bytes_max`` of them wait to be used again or are wanted by whoever lends them. What others keep of a block
    that has been let go of is theirs, and not counted. Tensors may end in any thread; all else is for one.
    """

    bytes_max: int
    acquired_bytes: int = 0
    _idle: list[_Allocation] = field(default_factory=list)
    # By the number of the number.
    _borrowed: dict[int, weakref.ref[memoryview]] = field(default_factory=dict)
    _borrow_count: int = 0
    # Where the end of a view leaves what it was a view of; nothing else is done there, whichever thread that is.
    _returned: deque[tuple[int, _Allocation]] = field(default_factory=deque)

    def can_acquire(self, nbytes: int) -> bool:
        """Tell whether another block may be wanted."""
        return self.acquired_bytes + nbytes <= self.bytes_max

    def has_idle(self, nbytes: int) -> bool:
        """Tell whether a block of that size waits to be used again."""
        self._reclaim()
        return any(memory.nbytes == nbytes for memory in self._idle)

    def acquire(self, nbytes: int) -> PoolBuffer:
        """Lend a block, one that was used before if there is one of that size; it is wanted until ``release``."""
        self._reclaim()
        self.acquired_bytes += nbytes
        memory = next((memory for memory in self._idle if memory.nbytes == nbytes), None)
        if memory is not None:
            self._idle.remove(memory)
        self._evict()
        if memory is None:
            memory = _Allocation(nbytes, *allocate(nbytes))
        # A view for each number: tensors hold it, and so it ends with the last of them.
        view = memoryview(memory.buffer)
        self._borrow_count += 1
        self._borrowed[self._borrow_count] = weakref.ref(
            view, partial(_return, self._returned, self._borrow_count, memory)
        )
        return PoolBuffer(nbytes, view, memory.start)

    def release(self, nbytes: int) -> None:
        """Want a block no longer: it waits to be used again once nobody else has it."""
        self.acquired_bytes -= nbytes

    def _reclaim(self) -> None:
        while self._returned:
            number, memory = self._returned.popleft()
            del self._borrowed[number]
            self._idle.append(memory)
        self._evict()

    def _evict(self) -> None:
        # The oldest first: what is asked for changes slowly.
        while self._idle and self.acquired_bytes + sum(memory.nbytes for memory in self._idle) > self.bytes_max:
            del self._idle[0]


def _return(returned: deque[tuple[int, _Allocation]], number: int, memory: _Allocation, _: object) -> None:
    returned.append((number, memory))
