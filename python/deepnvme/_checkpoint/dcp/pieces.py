"""Split a box of a stored tensor into ranges of its file that fit into a buffer. It does no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


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
