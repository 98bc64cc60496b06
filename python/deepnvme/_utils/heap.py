"""Free memory of the C library, which is returned to the system while tensors come and go.

glibc keeps the memory of freed tensors for the next ones. With small tensors that live longer in between, it keeps a
multiple of what is in use, and the more, the deeper a model is.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# The memory that may be resident in addition to the least that was. More of it means fewer page faults.
_SLACK_BYTES = 64 << 20
# Bytes of tensors between two looks.
_INTERVAL_BYTES = 16 << 20


class HeapTrimmer:
    """Returns free memory whenever the resident memory of the process has grown."""

    def __init__(self) -> None:
        # Other C libraries lack it.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._moved_bytes = 0
        self._least_bytes: int | None = None

    def trim(self) -> None:
        """Return all free memory to the system."""
        if self._trim is not None:
            self._trim(0)

    def moved(self, nbytes: int) -> None:
        """Count the bytes of tensors that were made or freed. Every 16 MiB, free memory is returned if it has grown."""
        self._moved_bytes += nbytes
        if self._moved_bytes < _INTERVAL_BYTES or self._trim is None:
            return
        self._moved_bytes = 0
        resident = _resident_bytes()
        if resident is None:
            return
        if self._least_bytes is None or resident < self._least_bytes:
            self._least_bytes = resident
        elif resident > self._least_bytes + _SLACK_BYTES:
            self._trim(0)
            self._least_bytes = _resident_bytes()


def _resident_bytes() -> int | None:
    """Return the resident memory of this process. ``None`` without a ``/proc``."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")
    return None


# The heap belongs to the process.
HEAP = HeapTrimmer()
