"""Memory for reads and writes: pinned, plain and fresh."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import torch

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
