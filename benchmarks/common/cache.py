"""Drops files from the page cache before a read, and checks that no page is left."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path

from common.sync import fsync

_DROP = Path("/proc/sys/vm/drop_caches")
_PROBES = 64
# The number of the system call: the same on all architectures.
_CACHESTAT = 451
# A page that is briefly held is not dropped.
_ATTEMPTS, _PAUSE_S = 5, 0.3

_spares_others = False


def spare_others() -> None:
    """Leave the page cache and the pending writes of other processes alone, from now on in this process."""
    global _spares_others  # noqa: PLW0603 - one page cache
    _spares_others = True


def drop_method() -> str:
    """Return how files are dropped from the page cache: ``drop_caches`` (root) or ``posix_fadvise``."""
    if _spares_others:
        return "posix_fadvise"
    return "drop_caches" if os.access(_DROP, os.W_OK) else "posix_fadvise"


def make_cold(path: Path) -> None:
    """Write out all dirty pages and drop `path` from the page cache.

    Raises:
        RuntimeError: when parts of the file are still cached, since a warm read is no disk read.
    """
    for _ in range(_ATTEMPTS):
        _write_out(path)
        drop(path)
        cached = cached_share(path)
        if not cached:
            return
        time.sleep(_PAUSE_S)
    raise RuntimeError(f"{cached:.2%} of {path} are still in the page cache; a cold read needs 0")


def drop(path: Path) -> None:
    """Drop `path` from the page cache, or everything if this is root. Dirty pages stay."""
    if drop_method() == "drop_caches":
        _DROP.write_text("3")
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _write_out(path: Path) -> None:
    if not _spares_others:
        os.sync()
        return
    fsync(path)


def cached_share(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache. Old kernels are asked for 64 spread pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if (counted := _count_cached(descriptor)) is not None:
            return counted / max(1, -(-os.fstat(descriptor).st_size // os.sysconf("SC_PAGESIZE")))
        step = max(1, os.fstat(descriptor).st_size // _PROBES)
        return sum(_is_cached(descriptor, index * step) for index in range(_PROBES)) / _PROBES
    finally:
        os.close(descriptor)


def _is_cached(descriptor: int, offset: int) -> bool:
    # RWF_NOWAIT does not wait for the disk. A miss may start to read the page all the same.
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False
        raise


def _count_cached(descriptor: int) -> int | None:
    """Ask ``cachestat`` (Linux 6.5) for the cached pages of a file. ``None`` if the kernel does not answer."""
    found, whole_file = (ctypes.c_uint64 * 5)(), (ctypes.c_uint64 * 2)(0, 0)
    failed = ctypes.CDLL(None).syscall(_CACHESTAT, descriptor, ctypes.byref(whole_file), ctypes.byref(found), 0)
    return None if failed else int(found[0])


def wait_for_writeback() -> None:
    """Let the disk finish the writes of the last tool, outside any timing."""
    if not _spares_others:
        os.sync()
