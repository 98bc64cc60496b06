"""The op `gds`: `gds_handle`, an `aio_handle` that tracks pinned tensors on GPUs.

GPU transfers bypass CPU memory where cuFile (GPUDirect Storage) really does so, and use the engine's bounce buffers
elsewhere. Pinned tensors are registered with cuFile in the first case. No `cufile.json` is written, and no environment
variable is changed.
"""

from __future__ import annotations

import torch

from . import _pinned_tensors
from .async_io import ALIGNMENT_BYTES, aio_handle


class gds_handle(aio_handle):  # noqa: N801 - the name is DeepSpeed's
    """Reads and writes tensors on GPUs and in CPU memory.

    Transfers do not require pinning, but memory that many of them use should be pinned. All handles of a process share
    one record, so any handle may free tensors of another. Dropped tensors leave the record by themselves. The
    arguments of the methods are those of `aio_handle`: `buffer`, `filename`, `fd`, `file_offset`, `validate`,
    `async_`, `num_elem`, `example_tenosr` (spelt as in DeepSpeed) and `tensor`.

    Args:
        block_size: as for `aio_handle`. Default 1 MiB.
        queue_depth: as for `aio_handle`. Default 128.
        single_submit: as for `aio_handle`. Default False.
        overlap_events: as for `aio_handle`. Default False.
        intra_op_parallelism: as for `aio_handle`. Default 1.

    Raises:
        TypeError, ValueError: an argument is not of its type, or below 1.

    Example:
        >>> from deepnvme.deepspeed import gds_handle
        >>> handle = gds_handle(queue_depth=32)
        >>> weights = handle.new_pinned_device_tensor(1000, torch.empty(0, device="cuda"))
        >>> handle.async_pwrite(weights.fill_(1), "weights")
        0
        >>> handle.wait()
        1
        >>> handle.free_pinned_device_tensor(weights)
        True
    """

    _gds = "preferred"

    __slots__ = ()

    def get_alignment(self) -> int:
        """Return 512, for callers that compute with it. Nothing has to be aligned."""
        return ALIGNMENT_BYTES

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """Return a new pinned 1-D tensor with dtype and device of the example (the keyword is DeepSpeed's)."""
        return _pinned_tensors.new_on_gpu(num_elem, example_tenosr, self._operations.pin)

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Free a tensor of `new_pinned_device_tensor` and leave it empty; returns True.

        Raises `ValueError` for any other tensor.
        """
        _pinned_tensors.free_on_gpu(tensor)
        return True

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Record a GPU tensor of the caller. Returns True. Raises `ValueError` if it is already recorded.

        If cuFile transfers directly, the memory of a contiguous tensor is registered with it until the tensor is
        unpinned or dropped, or later registrations need the room. Transfers of any part of it then bypass CPU memory.
        Otherwise, or if cuFile refuses, the tensor is only recorded, and transfers are unchanged.
        """
        _pinned_tensors.pin(tensor, self._operations.pin)
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Remove a tensor from the record and leave it unchanged; returns True.

        Raises `ValueError` if it is not recorded.
        """
        _pinned_tensors.unpin(tensor)
        return True
