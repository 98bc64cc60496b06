"""The limit of the disk: fio at the best settings of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from common import fio

if TYPE_CHECKING:
    from pathlib import Path

    from common.measure import Sample

_GRID = [(block, depth) for block in (512 << 10, 1 << 20, 2 << 20) for depth in (8, 16, 32)]
_TRIAL_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class DiskLimit:
    """Transfers of a given number of bytes by fio, with the settings that were fastest for a file."""

    size: int
    best_read: fio.FioSetting
    best_write: fio.FioSetting

    @classmethod
    def measure(cls, path: Path, size: int, *, huge: bool) -> DiskLimit:
        """Run two jobs of up to 1 GiB with each setting and direction, which takes minutes."""
        engines: tuple[fio.Engine, ...] = ("io_uring-fixed", "libaio")
        settings = [fio.FioSetting(engine, *cell, huge) for engine in engines for cell in _GRID]
        trial_bytes = min(size, _TRIAL_BYTES_MAX)

        def fastest(rw: Literal["read", "write"]) -> fio.FioSetting:
            def speed(setting: fio.FioSetting) -> float:
                return median(fio.transfer(setting, rw, path, trial_bytes).gb_per_s for _ in range(2))

            return fio.fastest(fio.measure_settings(settings, speed))

        # The jobs that write make the file.
        best_write = fastest("write")
        return cls(size, fastest("read"), best_write)

    def write(self, path: Path) -> Sample:
        """Write random bytes to a file."""
        return fio.transfer(self.best_write, "write", path, self.size)

    def read(self, path: Path) -> Sample:
        """Read a file."""
        return fio.transfer(self.best_read, "read", path, self.size)

    def __str__(self) -> str:
        return f"read {self.best_read}; write {self.best_write}"
