"""The op `pin_memory`: pinned CPU tensors without CUDA."""

from __future__ import annotations

import torch

from . import _pinned_tensors


class pin_handle:  # noqa: N801 - the name is DeepSpeed's
    """Allocates, frees and recognises pinned CPU tensors. All handles of a process share one record of them.

    The methods take `num_elem`, a number of elements; `example_tensor`, a tensor of the wanted dtype; `locked_tensor`,
    a result of `new_cpu_locked_tensor`; `address`, its `data_ptr()`; and `buffer`, any tensor.

    Example:
        >>> from deepnvme.deepspeed import pin_handle
        >>> handle = pin_handle()
        >>> tensor = handle.new_cpu_locked_tensor(1024, torch.empty(0))
        >>> handle.is_pinned(tensor[10:])
        True
    """

    __slots__ = ("__weakref__",)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a new 1-D pinned CPU tensor with the dtype of the example."""
        return _pinned_tensors.new(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Free a locked tensor and leave it empty. Returns False for any other tensor.

        Dropping the last reference to a locked tensor also frees it.
        """
        return _pinned_tensors.free(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Stop counting the region at `address` as locked. Returns whether it was counted.

        Its memory is freed with the last tensor on it.
        """
        return _pinned_tensors.free_at(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether `buffer` is a locked tensor of any handle, a view of one, or in torch's pinned memory."""
        return _pinned_tensors.is_pinned(buffer)
