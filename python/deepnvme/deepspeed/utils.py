"""The op `utils`: `cast_to_byte_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from deepnvme._utils.tensors import as_bytes

from . import _checks


@overload
def cast_to_byte_tensor(src_tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def cast_to_byte_tensor(src_tensor: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


def cast_to_byte_tensor(src_tensor: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return the bytes of a contiguous tensor as a 1-D uint8 tensor that shares and keeps its memory.

    Args:
        src_tensor: a tensor, or a sequence of them.

    Returns:
        A tensor of shape ``(nbytes,)``; for a sequence, a list of them.

    Raises:
        ValueError: a tensor is not contiguous: cast `tensor.contiguous()`.
        TypeError: it is no tensor.

    Example:
        >>> from deepnvme.deepspeed import cast_to_byte_tensor
        >>> cast_to_byte_tensor(torch.tensor([1, 2], dtype=torch.int16))
        tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    if isinstance(src_tensor, (list, tuple)):
        return [_as_bytes(tensor) for tensor in src_tensor]
    return _as_bytes(src_tensor)


def _as_bytes(value: object) -> torch.Tensor:
    return as_bytes(_checks.tensor(value, "src_tensor").detach())
