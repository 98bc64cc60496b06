"""Measure wall time and processor time of a call, make files cold, and compare tensors bit by bit."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost:
    """Costs of one call: wall seconds, and processor seconds in all threads of this process."""

    wall_s: float
    cpu_s: float


def measure(
    call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> tuple[Result, Cost]:
    """Call it, and return the costs."""
    begin, cpu_begin = time.perf_counter(), cpu_seconds()
    result = call(*args, **kwargs)
    return result, Cost(time.perf_counter() - begin, cpu_seconds() - cpu_begin)


def cpu_seconds() -> float:
    """Return user and system time of all threads, including kernel threads that work for this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def evict(path: Path) -> str:
    """Make the next read come from the device. Return how, or that it was not possible.

    After an fsync every page is clean, and `posix_fadvise` can drop it. If pages remain, root can drop the whole
    machine's cache.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    way = "posix_fadvise"
    if cached_share(path) > 0 and os.geteuid() == 0:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
            way = "drop_caches"
        except OSError:
            pass  # a container's root may not
    left = cached_share(path)
    return way if left == 0 else f"{way}, which left {left:.0%} of a file in memory"


def remove(path: Path) -> None:
    """Delete the file and wait until that is done. Otherwise the next write would pay for it."""
    path.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def cached_share(path: Path) -> float:
    """Return the fraction of the file's pages in the page cache, according to mincore."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapping:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first  # the mapping cannot be closed while something points into it
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return bytes(page & 1 for page in pages).count(1) / len(pages)


def same_bits(state: dict[str, torch.Tensor], back: dict[str, torch.Tensor], method: str) -> None:
    """Check that every name, dtype, shape and bit is the same.

    Raises:
        SystemExit: something differs; the message names the tensor.
    """
    if state.keys() != back.keys():
        raise SystemExit(f"FAILED: {method} returned other names: {sorted(state.keys() ^ back.keys())[:5]}")
    for name, tensor in state.items():
        other = back[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise SystemExit(f"FAILED: {method} returned {name} as {other.dtype} {tuple(other.shape)}")
        # As integers, because random floats include NaN, which equals nothing; as wide ones for speed.
        words = torch.uint8 if tensor.nbytes % 8 else torch.int64
        if not torch.equal(tensor.reshape(-1).view(words), other.reshape(-1).view(words)):
            raise SystemExit(f"FAILED: {method} returned other bits in {name}")
