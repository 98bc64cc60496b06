"""Huge pages for fio's buffers: reserved for a run as root, and released after it.

Direct reads are faster into contiguous memory, so fio with huge pages is the fair baseline.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNT = Path("/proc/sys/vm/nr_hugepages")
_MEMINFO = Path("/proc/meminfo")


@contextmanager
def reserved(size: int) -> Iterator[bool]:
    """Reserve huge pages of `size` bytes, and yield whether that succeeded.

    Without root, nothing is changed. If memory is too fragmented, fewer pages are reserved until the end.
    """
    try:
        before = _COUNT.read_text(encoding="ascii")
        _COUNT.write_text(str(int(before) + -(-size // _page_bytes())), encoding="ascii")
    except OSError as error:
        print(f"no huge pages for fio: {error}", file=sys.stderr)
        yield free_bytes() >= size
        return
    try:
        yield free_bytes() >= size
    finally:
        _COUNT.write_text(before, encoding="ascii")


def free_bytes() -> int:
    """Return the bytes of free reserved huge pages."""
    return _field("HugePages_Free") * _page_bytes()


def _page_bytes() -> int:
    return _field("Hugepagesize") << 10


def _field(name: str) -> int:
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{_MEMINFO} has no {name}; the kernel has no huge pages")
