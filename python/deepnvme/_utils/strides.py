"""Memory layout of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
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
