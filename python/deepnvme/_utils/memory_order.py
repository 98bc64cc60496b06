"""The order of tensors' elements in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class MemoryOrder(NamedTuple):
    """The order of a dense tensor's elements in memory. Dimensions that do not matter for it have the stride 0."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int]) -> MemoryOrder:
        """Return the order of a tensor with this shape and these strides."""
        is_empty = 0 in shape
        steps = [0 if is_empty or size == 1 else step for size, step in zip(shape, stride, strict=True)]
        return cls(tuple(shape), tuple(steps))

    @property
    def is_row_major(self) -> bool:
        """Whether the last dimension comes first in memory, and so on."""
        return self == MemoryOrder.of(self.shape, row_major(self.shape))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """View a flat tensor, whose elements are in this order, with its shape."""
        return flat.as_strided(self.shape, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps, in any order of dimensions. An empty one has none."""
    return _is_dense(tensor.shape, tensor.stride())


def is_dense_order(order: MemoryOrder) -> bool:
    """Whether a dense tensor can have this order."""
    return _is_dense(order.shape, order.stride)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 1, 0, -1):
        strides[at - 1] = strides[at] * max(shape[at], 1)
    return tuple(strides)
