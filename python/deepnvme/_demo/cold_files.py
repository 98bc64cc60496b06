"""Files that are not in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path


def drop(path: Path) -> bool:
    """Remove a file from the page cache. Returns whether all of it is gone.

    After an fsync every page is clean, and ``posix_fadvise`` can drop it. If pages remain, root can drop the page cache
    of the whole machine.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(path) > 0 and os.geteuid() == 0:
        # The root of a container may not.
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
    return cached_share(path) == 0


def cached_share(path: Path) -> float:
    """Return the share of the file's pages in the page cache, from 0 to 1."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapping:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first  # a mapping that something points into cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return bytes(page & 1 for page in pages).count(1) / len(pages)
