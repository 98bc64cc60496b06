"""Memory for reads and writes: pinned, plain and fresh, and the first touch of what a load returns."""

from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

PAGE_BYTES = 4096

_CAP_IPC_LOCK = 14


def pinned(size: int) -> torch.Tensor:
    """Return pinned memory of deepnvme, or where it is not installed a page-aligned mapping that is not pinned."""
    try:
        import deepnvme  # noqa: PLC0415
    except ImportError:
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    tensor: torch.Tensor = deepnvme.pinned_empty(size)
    return tensor


def plain(size: int) -> torch.Tensor:
    """Return an ordinary tensor whose pages are all in memory; torch aligns it to 64 bytes, not to a page."""
    return torch.empty(size, dtype=torch.uint8).fill_(1)


def fresh(size: int) -> torch.Tensor:
    """Return an ordinary tensor whose pages are faulted in during the read."""
    return torch.empty(size, dtype=torch.uint8)


def can_lock(size: int) -> bool:
    """Return whether this process may lock `size` bytes (its limit, or the capability to ignore it)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft in (resource.RLIM_INFINITY, -1) or soft >= size:
        return True
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def touch(tensors: Collection[torch.Tensor]) -> None:
    """Read a byte of each page of the tensors, so that no mapped page is still on the disk.

    Pages are taken together: a loop over ten thousand tensors costs as much as half of their load.
    """
    for start, end in _page_runs(tensors):
        run = (ctypes.c_ubyte * (end - start)).from_address(start)
        torch.frombuffer(run, dtype=torch.uint8)[::PAGE_BYTES].sum()


def _page_runs(tensors: Collection[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the begin and end of each contiguous run of pages that contain tensors."""
    runs: list[tuple[int, int]] = []
    spans = ((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes)
    for first, last in sorted(spans):
        start, end = first // PAGE_BYTES * PAGE_BYTES, -(-last // PAGE_BYTES) * PAGE_BYTES
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((start, end))
    return runs
