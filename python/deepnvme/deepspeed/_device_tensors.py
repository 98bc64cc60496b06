"""The record of pinned tensors on GPUs, and those of them that a handle has made.

A tensor is known by where it begins, as DeepSpeed knows it, so a view from its beginning will do in its place. The
record holds no memory: a storage that dies takes its entries along, and its address may come again. With its entry goes
the registration of its memory with cuFile, where there is one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from . import _arguments


class _Pinned(NamedTuple):
    """One entry of the record."""

    storage: weakref.ref[torch.UntypedStorage]
    # Whether `new` made the tensor, so that `free` may empty it.
    is_made_here: bool
    # What keeps cuFile knowing the memory, and ends that when it is dropped.
    registration: object


# Has cuFile know the memory of a contiguous tensor.
Register: TypeAlias = Callable[[torch.Tensor], object]


class PinnedDeviceTensors:
    """The pinned tensors that are alive, by address: GPUs and host share one space of addresses."""

    def __init__(self) -> None:
        # Re-entrant, since a storage may die in a garbage collection while this thread is inside a method.
        self._lock = threading.RLock()
        self._pinned: dict[int, _Pinned] = {}

    def add(self, tensor: torch.Tensor, register: Register, *, is_made_here: bool) -> None:
        """Records a tensor until its storage dies; `ValueError` where one that begins there is recorded."""
        start = tensor.data_ptr()
        storage = weakref.ref(tensor.untyped_storage(), partial(self._forget, start))
        with self._lock:
            found = self._pinned.get(start)
            if found is not None and found.storage() is not None:
                msg = f"{_named(tensor)} is pinned already"
                raise ValueError(msg)
            # What lies in pieces is recorded only: cuFile knows whole ranges.
            registration = register(tensor) if tensor.is_contiguous() else None
            self._pinned[start] = _Pinned(storage, is_made_here, registration)

    def remove(self, tensor: torch.Tensor) -> None:
        """Forgets a tensor, whoever made it; `ValueError` where it is not recorded."""
        with self._lock:
            if self._pinned.pop(tensor.data_ptr(), None) is None:
                msg = f"{_named(tensor)} is not pinned, or has been unpinned or freed already"
                raise ValueError(msg)

    def remove_made_here(self, tensor: torch.Tensor) -> None:
        """Forgets a tensor that `new` made; `ValueError` for any other, which stays what it is."""
        with self._lock:
            found = self._pinned.get(tensor.data_ptr())
            if found is None:
                msg = f"{_named(tensor)} was not made by new_pinned_device_tensor, or has been freed already"
                raise ValueError(msg)
            if not found.is_made_here:
                msg = f"{_named(tensor)} was pinned by pin_device_tensor; unpin_device_tensor takes that back"
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


pinned = PinnedDeviceTensors()


def new(num_elem: int, example: torch.Tensor, register: Register) -> torch.Tensor:
    """A 1-D tensor of `num_elem` elements, pinned, with dtype and device of `example`; its bytes are any."""
    count = _arguments.positive(num_elem, "num_elem")
    example = _arguments.tensor(example, "example tensor")
    if example.device.type != "cuda":
        msg = (
            f"the example tensor is on {example.device}, not on a GPU; "
            "page-locked CPU tensors are made by new_cpu_locked_tensor"
        )
        raise ValueError(msg)
    tensor = allocate(count, example)
    pinned.add(tensor, register, is_made_here=True)
    return tensor


def allocate(count: int, example: torch.Tensor) -> torch.Tensor:
    """Makes memory on the GPU of `example`, which need not be the current one."""
    return torch.empty(count, dtype=example.dtype, device=example.device)


def free(tensor: torch.Tensor) -> None:
    """Empties a tensor that `new` made; its memory goes with the last view of it, and with the last operation on it."""
    pinned.remove_made_here(_on_gpu(tensor))
    tensor.data = tensor.new_empty(0)


def pin(tensor: torch.Tensor, register: Register) -> None:
    """Records a tensor, which stays the caller's."""
    pinned.add(_on_gpu(tensor), register, is_made_here=False)


def unpin(tensor: torch.Tensor) -> None:
    """Takes a tensor out of the record, whoever made it."""
    pinned.remove(_on_gpu(tensor))


def _on_gpu(value: object) -> torch.Tensor:
    tensor = _arguments.tensor(value, "tensor")
    # An empty one has no address by which it could be known; freed ones are empty.
    if tensor.numel() == 0:
        msg = "tensor is empty, so it is not pinned and cannot be; a tensor that was freed is empty"
        raise ValueError(msg)
    if tensor.device.type != "cuda":
        msg = (
            f"tensor is on {tensor.device}, not on a GPU; "
            "page-locked CPU tensors have new_cpu_locked_tensor and free_cpu_locked_tensor"
        )
        raise ValueError(msg)
    return tensor


def _named(tensor: torch.Tensor) -> str:
    return f"the tensor of {tensor.numel()} elements at {tensor.data_ptr():#x} on {tensor.device}"
