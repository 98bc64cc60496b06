"""The limit of the disk: fio at the best settings of a sweep."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal

from common import fio

if TYPE_CHECKING:
    from pathlib import Path

    from common.measure import Sample

_GRID = [(block, depth) for block in (512 << 10, 1 << 20, 2 << 20) for depth in (8, 16, 32)]
_TRIAL_BYTES_MAX = 1 << 30


class DiskLimit:
    """Transfers of a given number of bytes by fio, with the settings that were fastest for `path`."""

    def __init__(self, path: Path, size: int, *, huge: bool) -> None:
        engines: tuple[fio.Engine, ...] = ("io_uring-fixed", "libaio")
        settings = [fio.FioSetting(engine, *cell, huge) for engine in engines for cell in _GRID]
        self._size = size
        self._best_write = max(settings, key=lambda setting: self._speed(path, "write", setting))
        self._best_read = max(settings, key=lambda setting: self._speed(path, "read", setting))

    def _speed(self, path: Path, rw: Literal["read", "write"], setting: fio.FioSetting) -> float:
        size = min(self._size, _TRIAL_BYTES_MAX)
        return median(fio.transfer(setting, rw, path, size).gb_per_s for _ in range(2))

    def write(self, path: Path) -> Sample:
        """Write random bytes to a file."""
        return fio.transfer(self._best_write, "write", path, self._size)

    def read(self, path: Path) -> Sample:
        """Read a file."""
        return fio.transfer(self._best_read, "read", path, self._size)

    def __str__(self) -> str:
        return f"read {self._best_read}; write {self._best_write}"
