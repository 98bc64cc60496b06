"""Page-locked CPU tensors that own their memory, and the record of where they lie.

A locked tensor is freed with the last tensor that shares its storage, so it can neither leak nor dangle. The record is
one per process, as any handle may free or recognise what another one made.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from functools import partial

import torch

import deepnvme

from . import _arguments


class PinnedRegions:
    """The address ranges of the locked tensors that are alive."""

    def __init__(self) -> None:
        # Re-entrant, since a storage may die in a garbage collection while this thread is inside a method.
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._regions: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Records the storage of a tensor until it dies."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        # Called before the memory is unmapped, so no other region can have taken the address yet.
        reference = weakref.ref(storage, partial(self._forget, start))
        with self._lock:
            self._regions[start] = (start + storage.nbytes(), reference)
            insort(self._starts, start)

    def remove(self, start: int) -> bool:
        """Forgets the region that begins at this address; False where none does."""
        with self._lock:
            found = self._regions.pop(start, None)
            if found is not None:
                self._starts.remove(start)
        return found is not None

    def contain(self, start: int, size_bytes: int) -> bool:
        """Whether one region holds all these bytes."""
        with self._lock:
            index = bisect_right(self._starts, start)
            if index == 0:
                return False
            end, _ = self._regions[self._starts[index - 1]]
        return start + size_bytes <= end

    def is_empty(self) -> bool:
        """Whether no region is alive."""
        with self._lock:
            return not self._starts

    def _forget(self, start: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self.remove(start)


regions = PinnedRegions()


def new(num_elem: int, example: torch.Tensor) -> torch.Tensor:
    """A 1-D, page-aligned, page-locked CPU tensor of `num_elem` elements with the dtype of `example`."""
    count = _arguments.natural(num_elem, "num_elem")
    dtype = _arguments.tensor(example, "example tensor").dtype
    if count == 0:
        return torch.empty(0, dtype=dtype)
    # `.data` is no view, so that nothing but this tensor and the views of it hold the memory.
    tensor = deepnvme.pinned_empty(count, dtype=dtype).data
    regions.add(tensor)
    return tensor


def free(tensor: torch.Tensor) -> bool:
    """Frees a locked tensor and leaves it empty; False, and nothing changed, for any other tensor.

    Views that are still alive keep the memory until they go.
    """
    if not regions.remove(_arguments.tensor(tensor, "tensor").data_ptr()):
        return False
    tensor.data = torch.empty(0, dtype=tensor.dtype)
    return True


def free_at(address: int) -> bool:
    """Stops counting the region at this address as locked; its memory goes with the last tensor on it."""
    return regions.remove(_arguments.integer(address, "address"))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in page-locked memory: that of a locked tensor (views too), or torch's own."""
    buffer = _arguments.tensor(tensor, "buffer")
    if buffer.device.type != "cpu" or buffer.numel() == 0:
        return False
    if regions.contain(buffer.data_ptr(), _span_bytes(buffer)):
        return True
    return buffer.is_pinned()


def _span_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
