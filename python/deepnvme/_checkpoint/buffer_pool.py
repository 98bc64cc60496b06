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
class _Memory:
    nbytes: int
    buffer: Any
    start: int


@dataclass
class Block:
    """Memory that is lent: in use as long as this or a tensor in it is."""

    nbytes: int
    view: memoryview
    start: int
    cut_bytes: int = 0

    def cut(self, nbytes: int) -> tuple[Any, int]:
        """Give a part that begins at a page, as ``arena.allocate`` does; memory of its own where nothing is left."""
        begin = self.cut_bytes
        if begin + nbytes > self.nbytes:
            return allocate(nbytes)
        self.cut_bytes = begin + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return self.view, self.start + begin


@dataclass
class Reused:
    """Blocks that are lent again and again.

    At most ``bytes_max`` of them wait to be used again or are wanted by whoever lends them. What others keep of a block
    that has been let go of is theirs, and not counted. Tensors may end in any thread; all else is for one.
    """

    bytes_max: int
    wanted_bytes: int = 0
    _spare: list[_Memory] = field(default_factory=list)
    # By the number of the loan.
    _lent: dict[int, weakref.ref[memoryview]] = field(default_factory=dict)
    _loans: int = 0
    # Where the end of a view leaves what it was a view of; nothing else is done there, whichever thread that is.
    _returned: deque[tuple[int, _Memory]] = field(default_factory=deque)

    def may_want(self, nbytes: int) -> bool:
        """Tell whether another block may be wanted."""
        return self.wanted_bytes + nbytes <= self.bytes_max

    def has(self, nbytes: int) -> bool:
        """Tell whether a block of that size waits to be used again."""
        self._collect()
        return any(memory.nbytes == nbytes for memory in self._spare)

    def take(self, nbytes: int) -> Block:
        """Lend a block, one that was used before if there is one of that size; it is wanted until ``let_go``."""
        self._collect()
        self.wanted_bytes += nbytes
        memory = next((memory for memory in self._spare if memory.nbytes == nbytes), None)
        if memory is not None:
            self._spare.remove(memory)
        self._make_room()
        if memory is None:
            memory = _Memory(nbytes, *allocate(nbytes))
        # A view for each loan: tensors hold it, and so it ends with the last of them.
        view = memoryview(memory.buffer)
        self._loans += 1
        self._lent[self._loans] = weakref.ref(view, partial(_come_back, self._returned, self._loans, memory))
        return Block(nbytes, view, memory.start)

    def let_go(self, nbytes: int) -> None:
        """Want a block no longer: it waits to be used again once nobody else has it."""
        self.wanted_bytes -= nbytes

    def _collect(self) -> None:
        while self._returned:
            loan, memory = self._returned.popleft()
            del self._lent[loan]
            self._spare.append(memory)
        self._make_room()

    def _make_room(self) -> None:
        # The oldest first: what is asked for changes slowly.
        while self._spare and self.wanted_bytes + sum(memory.nbytes for memory in self._spare) > self.bytes_max:
            del self._spare[0]


def _come_back(returned: deque[tuple[int, _Memory]], loan: int, memory: _Memory, _: object) -> None:
    returned.append((loan, memory))
