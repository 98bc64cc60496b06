"""Track pinned tensors on GPUs.

As in DeepSpeed, a tensor is identified by its start address, so a view with the same start can take its place. Entries
hold no memory: they vanish with the storage, whose address may then be reused. The registration with cuFile ends with
the entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from deepnvme._utils.fork_locks import make_lock

from . import _arguments


class _Pinned(NamedTuple):
    """One entry."""

    storage: weakref.ref[torch.UntypedStorage]
    # Whether `new` made the tensor, so that `free` may empty it.
    is_made_here: bool
    # The registration with cuFile, which ends when this object is dropped.
    registration: object


# Registers the memory of a contiguous tensor with cuFile.
Register: TypeAlias = Callable[[torch.Tensor], object]


class PinnedDeviceTensors:
    """The live pinned tensors by address. GPUs and CPU share one address space."""

    def __init__(self) -> None:
        # Re-entrant: a garbage collection inside a method may free a storage.
        self._lock = make_lock()
        self._pinned: dict[int, _Pinned] = {}

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
            self._pinned[start] = _Pinned(storage, is_made_here, registration)

    def remove(self, tensor: torch.Tensor) -> None:
        """Remove a tensor, made by deepnvme or not. `ValueError` if it is not recorded."""
        with self._lock:
            if self._pinned.pop(tensor.data_ptr(), None) is None:
                msg = f"{_named(tensor)} is not pinned, or has been unpinned or freed already"
                raise ValueError(msg)

    def remove_made_here(self, tensor: torch.Tensor) -> None:
        """Remove a tensor that `new` made. `ValueError` for any other."""
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


pinned = PinnedDeviceTensors()


def new(num_elem: int, example: torch.Tensor, register: Register) -> torch.Tensor:
    """Allocate a pinned, uninitialised 1-D tensor of `num_elem` elements with dtype and device of `example`."""
    count = _arguments.positive(num_elem, "num_elem")
    example = _arguments.tensor(example, "example tensor")
    if example.device.type != "cuda":
        msg = (
            f"the example tensor is on {example.device}, not on a GPU; for pinned CPU tensors use new_cpu_locked_tensor"
        )
        raise ValueError(msg)
    tensor = allocate(count, example)
    pinned.add(tensor, register, is_made_here=True)
    return tensor


def allocate(count: int, example: torch.Tensor) -> torch.Tensor:
    """Allocate memory on the GPU of `example`, which need not be the current one."""
    return torch.empty(count, dtype=example.dtype, device=example.device)


def free(tensor: torch.Tensor) -> None:
    """Empty a tensor that `new` made. Its memory is freed with the last view of it and the last operation on it."""
    pinned.remove_made_here(_on_gpu(tensor))
    tensor.data = tensor.new_empty(0)


def pin(tensor: torch.Tensor, register: Register) -> None:
    """Record a tensor that stays the caller's."""
    pinned.add(_on_gpu(tensor), register, is_made_here=False)


def unpin(tensor: torch.Tensor) -> None:
    """Remove a tensor from the record, made by deepnvme or not."""
    pinned.remove(_on_gpu(tensor))


def _on_gpu(value: object) -> torch.Tensor:
    tensor = _arguments.tensor(value, "tensor")
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
