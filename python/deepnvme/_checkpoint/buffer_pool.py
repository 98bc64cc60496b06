"""A pool of buffers, which are reused once no tensor uses them.

Fresh memory costs more than reading into it: the kernel fills it with zeros, and the host of a virtual machine may
have to allocate it first.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deepnvme._checkpoint.allocation import allocate

PAGE_BYTES = 4096


@dataclass(frozen=True)
class _Allocation:
    nbytes: int
    buffer: Any
    start: int


@dataclass
class PoolBuffer:
    """A buffer of the pool. It is in use while this object or a tensor in it exists."""

    nbytes: int
    view: memoryview
    start: int
    used_bytes: int = 0

    def allocate_part(self, nbytes: int) -> tuple[Any, int]:
        """Return a page-aligned part, like ``allocate``; fresh memory if the buffer is used up."""
        begin = self.used_bytes
        if begin + nbytes > self.nbytes:
            return allocate(nbytes)
        self.used_bytes = begin + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return self.view, self.start + begin


@dataclass
class BufferPool:
    """Buffers that are handed out again and again.

    Idle buffers and those that are acquired take at most ``bytes_max``. A released buffer that tensors still use is not
    counted. Tensors may be freed in any thread; everything else is for one thread.
    """

    bytes_max: int
    acquired_bytes: int = 0
    _idle: list[_Allocation] = field(default_factory=list)
    # By the number of the acquisition.
    _in_use: dict[int, weakref.ref[memoryview]] = field(default_factory=dict)
    _acquisitions: int = 0
    # The callback of a freed view only appends here, since it runs in any thread.
    _returned: deque[tuple[int, _Allocation]] = field(default_factory=deque)

    def can_acquire(self, nbytes: int) -> bool:
        """Whether another buffer fits into the limit."""
        return self.acquired_bytes + nbytes <= self.bytes_max

    def has_idle(self, nbytes: int) -> bool:
        """Whether an idle buffer of this size is available."""
        self._reclaim()
        return any(memory.nbytes == nbytes for memory in self._idle)

    def acquire(self, nbytes: int) -> PoolBuffer:
        """Hand out a buffer, an idle one if there is one of this size. It counts until ``release``."""
        self._reclaim()
        self.acquired_bytes += nbytes
        memory = next((memory for memory in self._idle if memory.nbytes == nbytes), None)
        if memory is not None:
            self._idle.remove(memory)
        self._evict()
        if memory is None:
            memory = _Allocation(nbytes, *allocate(nbytes))
        # A view for each acquisition: tensors refer to it, so it ends with the last of them.
        view = memoryview(memory.buffer)
        self._acquisitions += 1
        self._in_use[self._acquisitions] = weakref.ref(
            view, partial(_return, self._returned, self._acquisitions, memory)
        )
        return PoolBuffer(nbytes, view, memory.start)

    def release(self, nbytes: int) -> None:
        """Release a buffer. It becomes idle once no tensor uses it."""
        self.acquired_bytes -= nbytes

    def _reclaim(self) -> None:
        while self._returned:
            number, memory = self._returned.popleft()
            del self._in_use[number]
            self._idle.append(memory)
        self._evict()

    def _evict(self) -> None:
        # The oldest first: requested sizes change slowly.
        while self._idle and self.acquired_bytes + sum(memory.nbytes for memory in self._idle) > self.bytes_max:
            del self._idle[0]


def _return(returned: deque[tuple[int, _Allocation]], number: int, memory: _Allocation, _: object) -> None:
    returned.append((number, memory))
