"""The op `gds`: `gds_handle`, which is `aio_handle` with a record of pinned tensors on GPUs.

Bytes of a GPU go past the host's memory where cuFile (GPUDirect Storage) really does that, and by way of the engine's
bounce slots elsewhere. Pinned tensors are registered with cuFile, where it really does. No `cufile.json` is written,
and no variable of the environment changed.
"""

from __future__ import annotations

import torch

from . import _device_tensors
from .async_io import ALIGNMENT_BYTES, aio_handle


class gds_handle(aio_handle):  # noqa: N801 - the name is DeepSpeed's
    """Reads and writes tensors on GPUs, and in CPU memory as `aio_handle` does; the arguments are the same.

    Nothing has to be pinned for a transfer; memory that many of them use should be. Pinned tensors are recorded once
    per process, so any handle may free what another one has made; a tensor that is dropped leaves the record by itself.

    >>> handle = gds_handle(queue_depth=32)
    >>> weights = handle.new_pinned_device_tensor(1000, torch.empty(0, device="cuda"))
    >>> handle.async_pwrite(weights.fill_(1), "/tmp/weights")
    0
    >>> handle.wait()
    1
    >>> handle.free_pinned_device_tensor(weights)
    True
    """

    _gds = "preferred"

    __slots__ = ()

    def get_alignment(self) -> int:
        """512, whatever the parallelism, for callers that compute with it; nothing has to be aligned."""
        return ALIGNMENT_BYTES

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A pinned 1-D tensor with dtype and device of the example (the keyword is DeepSpeed's); owns its memory."""
        return _device_tensors.new(num_elem, example_tenosr, self._operations.pin)

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Frees what `new_pinned_device_tensor` made and leaves it empty; True. `ValueError` for any other tensor."""
        _device_tensors.free(tensor)
        return True

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Records a tensor on a GPU, which stays the caller's; True. `ValueError` where it is recorded already.

        Where cuFile takes the short way, it is told of the memory of a contiguous tensor, until the tensor is unpinned
        or dropped, or later ones need the room; transfers of any part of it then pass through nothing else. Elsewhere,
        and where cuFile refuses, nothing but the record is made; transfers are the same.
        """
        _device_tensors.pin(tensor, self._operations.pin)
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Takes a tensor out of the record and leaves it as it is; True. `ValueError` where it is not in there."""
        _device_tensors.unpin(tensor)
        return True
