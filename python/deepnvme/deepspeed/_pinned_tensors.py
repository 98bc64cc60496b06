"""Pinned CPU tensors that own their memory, and a record of their addresses.

A locked tensor is freed with the last tensor that shares its storage, so it can neither leak nor dangle. All handles of
a process share one record, since each may free or recognise the tensors of others.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from functools import partial

import torch

from deepnvme._utils.fork_locks import make_lock
from deepnvme._utils.tensors import pinned_empty

from . import _arguments


class PinnedRegions:
    """The address ranges of live locked tensors."""

    def __init__(self) -> None:
        # Re-entrant: a garbage collection inside a method may free a storage.
        self._lock = make_lock()
        self._starts: list[int] = []
        self._regions: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Record the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        # Called before the memory is unmapped, so the address cannot have been reused yet.
        reference = weakref.ref(storage, partial(self._forget, start))
        with self._lock:
            self._regions[start] = (start + storage.nbytes(), reference)
            insort(self._starts, start)

    def remove(self, start: int) -> bool:
        """Remove the region that begins at this address. Returns False if there is none."""
        with self._lock:
            found = self._regions.pop(start, None)
            if found is not None:
                self._starts.remove(start)
        return found is not None

    def contain(self, start: int, size_bytes: int) -> bool:
        """Whether one region contains all these bytes."""
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
    """Allocate a 1-D, page-aligned, pinned CPU tensor of `num_elem` elements with the dtype of `example`."""
    count = _arguments.natural(num_elem, "num_elem")
    dtype = _arguments.tensor(example, "example tensor").dtype
    if count == 0:
        return torch.empty(0, dtype=dtype)
    # `.data` is not a view, so only this tensor and its views hold the memory.
    tensor = pinned_empty(count, dtype=dtype).data
    regions.add(tensor)
    return tensor


def free(tensor: torch.Tensor) -> bool:
    """Free a locked tensor and leave it empty. Returns False, and changes nothing, for any other tensor.

    Live views keep the memory until they are dropped.
    """
    if not regions.remove(_arguments.tensor(tensor, "tensor").data_ptr()):
        return False
    tensor.data = torch.empty(0, dtype=tensor.dtype)
    return True


def free_at(address: int) -> bool:
    """Stop counting the region at this address as locked. Its memory is freed with the last tensor on it."""
    return regions.remove(_arguments.integer(address, "address"))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pinned memory: that of a locked tensor, views included, or torch's own."""
    buffer = _arguments.tensor(tensor, "buffer")
    if buffer.device.type != "cpu" or buffer.numel() == 0:
        return False
    if regions.contain(buffer.data_ptr(), _span_bytes(buffer)):
        return True
    return buffer.is_pinned()


def _span_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
