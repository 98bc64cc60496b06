"""Allocates the memory of loads: private and aligned. Only pinning touches it before."""

from __future__ import annotations

import errno
import mmap
from typing import Any

import torch

from deepnvme._utils.capture import relaxed_capture
from deepnvme._utils.tensors import pinned_empty
from deepnvme.errors import OutOfMemoryError

_HUGE_BYTES = 2 << 20
# From this size on, rounding up to huge pages wastes little.
_HUGE_BYTES_MIN = 8 << 20


def allocate(nbytes: int, *, pin_memory: bool = False) -> tuple[Any, int]:
    """Allocate private memory. Returns it, and the page-aligned offset of the ``nbytes``.

    Memory that is not pinned is not touched. In large allocations of it, the offset is aligned to a huge page. The load
    decides whether to use huge pages.
    """
    if pin_memory:
        return pinned_empty(nbytes).numpy(), 0
    if nbytes < _HUGE_BYTES_MIN:
        return _mapped(nbytes), 0
    # The part before the first huge page is never touched, so it takes no memory.
    memory = _mapped((-(-nbytes // _HUGE_BYTES) + 1) * _HUGE_BYTES)
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return memory, -address % _HUGE_BYTES


def _mapped(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise OutOfMemoryError(f"there is not enough memory for {nbytes} bytes of tensors") from error


def allocate_on_gpu(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate GPU memory without touching it."""
    with relaxed_capture():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
