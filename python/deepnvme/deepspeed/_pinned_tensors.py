"""Pinned tensors, in CPU memory and on GPUs, and the records of them. All handles of a process share both records.

A locked CPU tensor owns its memory, and is freed with the last tensor that shares its storage, so it can neither leak
nor dangle. Each handle may free or recognise the tensors of others.

On GPUs, as in DeepSpeed, a tensor is identified by its start address, so a view with the same start can take its place.
Entries hold no memory: they vanish with the storage, whose address may then be reused. The registration with cuFile
ends with the entry.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.tensors import pinned_empty

from . import _checks


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
    count = _checks.natural(num_elem, "num_elem")
    dtype = _checks.tensor(example, "example tensor").dtype
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
    if not regions.remove(_checks.tensor(tensor, "tensor").data_ptr()):
        return False
    tensor.data = torch.empty(0, dtype=tensor.dtype)
    return True


def free_at(address: int) -> bool:
    """Stop counting the region at this address as locked. Its memory is freed with the last tensor on it."""
    return regions.remove(_checks.integer(address, "address"))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pinned memory: that of a locked tensor, views included, or torch's own."""
    buffer = _checks.tensor(tensor, "buffer")
    if buffer.device.type != "cpu" or buffer.numel() == 0:
        return False
    if regions.contain(buffer.data_ptr(), _span_bytes(buffer)):
        return True
    return buffer.is_pinned()


def _span_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class _PinnedOnGpu(NamedTuple):
    """One entry of the record of GPUs."""

    storage: weakref.ref[torch.UntypedStorage]
    # Whether `new_on_gpu` made the tensor, so that `free_on_gpu` may empty it.
    is_made_here: bool
    # The registration with cuFile, which ends when this object is dropped.
    registration: object


# Registers the memory of a contiguous tensor with cuFile.
Register: TypeAlias = Callable[[torch.Tensor], object]


class PinnedDeviceTensors:
    """The live pinned tensors on GPUs by address. GPUs and CPU share one address space."""

    def __init__(self) -> None:
        # Re-entrant: a garbage collection inside a method may free a storage.
        self._lock = make_lock()
        self._pinned: dict[int, _PinnedOnGpu] = {}

    def add(self, tensor: torch.Tensor, register: Register, *, is_made_here: bool) -> None:
        """Record a tensor until its storage is freed. `ValueError` if one with the same address is recorded."""
        start = tensor.data_ptr()
        storage = weakref.ref(tensor.untyped_storage(), partial(self._forget, start))
        with self._lock:
            found = self._pinned.get(start)
            if found is not None and found.storage() is not None:
                msg = f"{_named(tensor)} is pinned already; unpin it first"
                raise ValueError(msg)
            # Non-contiguous tensors are only recorded: cuFile registers whole ranges.
            registration = register(tensor) if tensor.is_contiguous() else None
            self._pinned[start] = _PinnedOnGpu(storage, is_made_here, registration)

    def remove(self, tensor: torch.Tensor) -> None:
        """Remove a tensor, made by deepnvme or not. `ValueError` if it is not recorded."""
        with self._lock:
            if self._pinned.pop(tensor.data_ptr(), None) is None:
                msg = f"{_named(tensor)} is not pinned, or has been unpinned or freed already"
                raise ValueError(msg)

    def remove_made_here(self, tensor: torch.Tensor) -> None:
        """Remove a tensor that `new_on_gpu` made. `ValueError` for any other."""
        with self._lock:
            found = self._pinned.get(tensor.data_ptr())
            if found is None:
                msg = f"{_named(tensor)} was not made by new_pinned_device_tensor, or has been freed already"
                raise ValueError(msg)
            if not found.is_made_here:
                msg = f"{_named(tensor)} was pinned by pin_device_tensor; unpin_device_tensor undoes that"
                raise ValueError(msg)
            del self._pinned[tensor.data_ptr()]

    def __len__(self) -> int:
        with self._lock:
            return len(self._pinned)

    def _forget(self, start: int, storage: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            found = self._pinned.get(start)
            if found is not None and found.storage is storage:
                del self._pinned[start]


pinned_on_gpu = PinnedDeviceTensors()


def new_on_gpu(num_elem: int, example: torch.Tensor, register: Register) -> torch.Tensor:
    """Allocate a pinned, uninitialised 1-D tensor of `num_elem` elements with dtype and device of `example`."""
    count = _checks.positive(num_elem, "num_elem")
    example = _checks.tensor(example, "example tensor")
    if example.device.type != "cuda":
        msg = (
            f"the example tensor is on {example.device}, not on a GPU; for pinned CPU tensors use new_cpu_locked_tensor"
        )
        raise ValueError(msg)
    tensor = allocate_on_gpu(count, example)
    pinned_on_gpu.add(tensor, register, is_made_here=True)
    return tensor


def allocate_on_gpu(count: int, example: torch.Tensor) -> torch.Tensor:
    """Allocate memory on the GPU of `example`, which need not be the current one."""
    return torch.empty(count, dtype=example.dtype, device=example.device)


def free_on_gpu(tensor: torch.Tensor) -> None:
    """Empty a tensor of `new_on_gpu`. Its memory is freed with the last view of it and the last operation on it."""
    pinned_on_gpu.remove_made_here(_on_gpu(tensor))
    tensor.data = tensor.new_empty(0)


def pin(tensor: torch.Tensor, register: Register) -> None:
    """Record a tensor that stays the caller's."""
    pinned_on_gpu.add(_on_gpu(tensor), register, is_made_here=False)


def unpin(tensor: torch.Tensor) -> None:
    """Remove a tensor from the record, made by deepnvme or not."""
    pinned_on_gpu.remove(_on_gpu(tensor))


def _on_gpu(value: object) -> torch.Tensor:
    tensor = _checks.tensor(value, "tensor")
    # An empty tensor has no address to identify it. Freed tensors are empty.
    if tensor.numel() == 0:
        msg = "tensor is empty, so it cannot be pinned; a tensor that was freed is empty"
        raise ValueError(msg)
    if tensor.device.type != "cuda":
        msg = (
            f"tensor is on {tensor.device}, not on a GPU; "
            "for pinned CPU tensors use new_cpu_locked_tensor and free_cpu_locked_tensor"
        )
        raise ValueError(msg)
    return tensor


def _named(tensor: torch.Tensor) -> str:
    return f"the tensor of {tensor.numel()} elements at {tensor.data_ptr():#x} on {tensor.device}"
