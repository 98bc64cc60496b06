"""Items of a distributed load that pass through buffers, piece by piece, in groups that fit into a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deepnvme._checkpoint.load_into import compare
from deepnvme._utils.capture import relaxed_capture_for
from deepnvme._utils.tensors import copy_exactly

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import ReadItem

    from deepnvme._checkpoint.dcp.shard import Shard

# Memory for items that pass through a buffer. All others are read in place.
COPIED_BYTES_MAX = 64 << 20


@dataclass(eq=False)
class ItemCopy:
    """An item that passes through a buffer.

    It is a part of rows, or one of two tied weights, or its target has another dtype, another device, or lazy signs.
    """

    shard: Shard
    name: str
    item: ReadItem
    target: torch.Tensor
    dtype: torch.dtype
    shape: list[int]
    is_tied: bool
    """Whether another item has filled the target. This checkpoint may have untied the two."""
    sources: dict[Piece, torch.Tensor] = field(default_factory=dict)

    def pieces(self) -> Iterator[Piece]:
        """Split the item into pieces that fit into the buffers."""
        if self.target.numel():
            box = list(self.item.storage_offsets), list(self.item.lengths)
            yield from pieces(self.shape, *box, COPIED_BYTES_MAX // self.dtype.itemsize)

    def request(self, piece: Piece) -> None:
        """Request a piece from the file."""
        source = self.sources[piece] = torch.empty(piece.shape, dtype=self.dtype)
        self.shard.request(self.name, piece.start * self.dtype.itemsize, source)

    def finish(self, piece: Piece) -> None:
        """Copy a piece into the target, or compare it."""
        source = piece.of_source(self.sources.pop(piece), list(self.item.storage_offsets), list(self.item.lengths))
        target = piece.of_target(self.target)
        if self.is_tied:
            compare(f"{self.shard.path}: {self.name}", target, source)
            return
        with relaxed_capture_for(target.device):
            copy_exactly(target, source)


def groups_of(copies: list[ItemCopy]) -> Iterator[list[tuple[ItemCopy, Piece]]]:
    """Group the pieces of copies, so that the buffers of each group stay within the limit."""
    group: list[tuple[ItemCopy, Piece]] = []
    nbytes = 0
    for copy in copies:
        for piece in copy.pieces():
            if group and nbytes + piece.elements * copy.dtype.itemsize > COPIED_BYTES_MAX:
                yield group
                group, nbytes = [], 0
            group.append((copy, piece))
            nbytes += piece.elements * copy.dtype.itemsize
    if group:
        yield group


@dataclass(frozen=True)
class Piece:
    """A part of a box, and the range of the file that contains it.

    The range has whole rows of the stored tensor: only some of their elements may belong to the box.
    """

    index: tuple[int, ...]
    """The index of the part in the box, in the leading dimensions."""
    first: int
    """The first index of the part in the next dimension."""
    count: int
    """The number of indices in that dimension."""
    start: int
    """The first element of the range."""
    shape: tuple[int, ...]
    """The shape of the range."""

    @property
    def elements(self) -> int:
        """The number of elements in the range."""
        return math.prod(self.shape)

    def of_target(self, target: torch.Tensor) -> torch.Tensor:
        """Return the part of the tensor that the box fills."""
        part = target[self.index]
        return part.narrow(0, self.first, self.count) if part.dim() else part

    def of_source(self, source: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return the elements of the range that belong to the box."""
        outer = len(self.index) + 1
        for dimension in range(1, len(self.shape)):
            place = outer + dimension - 1
            source = source.narrow(dimension, starts[place], lengths[place])
        return source


def pieces(shape: Sequence[int], starts: Sequence[int], lengths: Sequence[int], elements_max: int) -> Iterator[Piece]:
    """Split the box of these starts and lengths.

    Args:
        shape: the shape of the stored tensor, in row-major order.
        starts: the first index of the box in each dimension.
        lengths: the number of indices in each dimension. No box is empty.
        elements_max: the maximum elements of a range. One element is always allowed.
    """
    if not shape:
        yield Piece((), 0, 1, 0, ())
        return
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]

    def split(index: tuple[int, ...], start: int) -> Iterator[Piece]:
        dimension = len(index)
        stride = strides[dimension]
        if stride > elements_max and dimension + 1 < len(shape):
            for at in range(lengths[dimension]):
                yield from split((*index, at), start + (starts[dimension] + at) * stride)
            return
        step = max(elements_max // stride, 1)
        for first in range(0, lengths[dimension], step):
            count = min(step, lengths[dimension] - first)
            begin = start + (starts[dimension] + first) * stride
            yield Piece(index, first, count, begin, (count, *shape[dimension + 1 :]))

    yield from split((), 0)
