"""The memory order of parameters, and tensors in that order: state, gradients, flat views."""

from __future__ import annotations

import torch

from deepnvme._modules.weight_classes import ON_DISK_STRIDE
from deepnvme._utils.tensors import MemoryOrder, is_dense, row_major
from deepnvme.errors import InvalidArgumentError


def with_strides_of(param: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return state in the memory order of its parameter. Saved state may have another order."""
    return state if has_order_of(param, state) else empty_as(param, state.dtype).copy_(state)


def has_order_of(param: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether state has the memory order of its parameter."""
    stride = stride_of(param)
    return state.stride() == stride or (state.is_contiguous() and stride == row_major(param.shape))


def empty_as(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor with the memory order of a parameter."""
    return torch.empty_strided(param.shape, stride_of(param), dtype=dtype, device=param.device)


def stride_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter; of one on disk, the strides it has in memory."""
    stride: tuple[int, ...] = getattr(param, ON_DISK_STRIDE, None) or param.stride()
    return stride


def order_of(param: torch.Tensor) -> MemoryOrder:
    """Return the memory order of a parameter; of one on disk, the order it has in memory."""
    return MemoryOrder.of(param.shape, stride_of(param))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View all elements in memory order."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor):
        msg = f"a parameter of shape {tuple(tensor.shape)} has gaps or overlaps; pass parameter.contiguous() instead"
        raise InvalidArgumentError(msg)
    return tensor.as_strided((tensor.numel(),), (1,))
