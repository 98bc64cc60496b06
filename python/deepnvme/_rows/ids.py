"""The ids of a gather: integers of a tensor, an array or a list."""

from __future__ import annotations

from typing import Any

import torch

from deepnvme._utils.arguments import shown
from deepnvme._utils.signal_errors import is_of_handler
from deepnvme.errors import UnsupportedError


def check_ids(ids: Any) -> tuple[torch.Tensor, tuple[bool, int]]:
    """Return ids as a contiguous tensor on the CPU, and whether they are signed, and their bytes."""
    if torch._C._get_tracing_state() is not None:  # noqa: SLF001
        msg = "a trace would record this gather without its rows; call the model without tracing it"
        raise UnsupportedError(msg)
    tensor = ids if isinstance(ids, torch.Tensor) else _as_tensor(ids)
    dtype = tensor.dtype
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    if not is_plain or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        msg = f"ids are {dtype}, {tensor.layout}, on {tensor.device}; they must be integers, such as torch.int64"
        raise TypeError(msg)
    return tensor.detach().cpu().contiguous(), (dtype.is_signed, dtype.itemsize)


def _as_tensor(ids: Any) -> torch.Tensor:
    """Make a tensor of an array, or of a list of integers."""
    try:
        # A copy: torch warns of arrays that cannot be written to, and refuses negative strides.
        tensor = torch.tensor(ids.copy() if hasattr(ids, "__array_interface__") else ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if is_of_handler(error):
            raise
        large = _first_large(ids, [0])
        if large is not None:
            msg = "id {} at position {} is no row, and exceeds 64 bits".format(*large)
            raise IndexError(msg) from None
        msg = f"ids are {shown(ids)}; they must be a tensor, an array or a list of integers"
        raise TypeError(msg) from error
    return tensor.to(torch.int64) if tensor.numel() == 0 and isinstance(ids, list | tuple) else tensor


def _first_large(ids: Any, position: list[int]) -> tuple[int, int] | None:
    """Return the first integer of nested lists that no tensor can hold, and its position."""
    if isinstance(ids, int):
        position[0] += 1
        return None if -(1 << 63) <= ids < 1 << 63 else (ids, position[0] - 1)
    if isinstance(ids, list | tuple):
        for one in ids:
            if (found := _first_large(one, position)) is not None:
                return found
    return None
