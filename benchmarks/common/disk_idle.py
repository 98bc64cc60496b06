"""Waits until a disk is idle.

A disk may be busy with a removed file after `sync` returns. On one machine, a virtual disk took a second to return
the space to its host, and wrote at a fifth of its speed meanwhile.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PROBE_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_PAUSE_S = 0.2
_WAIT_MAX_S = 10.0
# A probe is quick if it takes at most this many times as long as the quickest one.
_TIMES_QUICKEST = 1.5
# Quick probes in a row until the disk counts as idle.
_QUICK_MIN = 3


class DiskIdleProbe:
    """Writes a file in place repeatedly to measure the current speed of the disk."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        self._chunk = mmap.mmap(-1, _CHUNK_BYTES)
        self._chunk.write(os.urandom(_CHUNK_BYTES))
        self._quickest_s = min(self._probe() for _ in range(5))

    def _probe(self) -> float:
        start = time.perf_counter()
        for offset in range(0, _PROBE_BYTES, _CHUNK_BYTES):
            os.pwrite(self._descriptor, self._chunk, offset)
        os.fsync(self._descriptor)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Return when the disk is as quick as before, or after ten seconds."""
        os.sync()
        end = time.monotonic() + _WAIT_MAX_S
        quick = 0
        while quick < _QUICK_MIN and time.monotonic() < end:
            time.sleep(_PAUSE_S)
            took_s = self._probe()
            quick = quick + 1 if took_s <= _TIMES_QUICKEST * self._quickest_s else 0
            self._quickest_s = min(self._quickest_s, took_s)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@contextmanager
def idle_disk(folder: Path) -> Iterator[DiskIdleProbe]:
    """Yield a probe for the disk of a folder."""
    path = folder / "idle.probe"
    probe = DiskIdleProbe(path)
    try:
        yield probe
    finally:
        probe.close()
        path.unlink()
