"""The limit of the disk: fio with the same number of bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from checkpointbench.models import State
from checkpointbench.tools import Tool
from storagebench import fio

_GRID = [(block, depth) for block in (512 << 10, 1 << 20, 2 << 20) for depth in (8, 16, 32)]


class Fio(Tool):
    """fio at the best settings of a sweep: the disk's own limit for so many bytes."""

    name = "fio best"
    suffix = ".raw"

    def __init__(self, path: Path, size: int, *, huge: bool) -> None:
        engines: tuple[fio.Engine, ...] = ("io_uring-fixed", "libaio")
        settings = [fio.FioSetting(engine, *cell, huge) for engine in engines for cell in _GRID]
        self._size = size
        self._best = {rw: max(settings, key=partial(self._speed, path, rw)) for rw in ("write", "read")}

    def _speed(self, path: Path, rw: Any, setting: fio.FioSetting) -> float:
        return median(fio.transfer(setting, rw, path, min(self._size, 1 << 30)).gb_per_s for _ in range(2))

    def save(self, state: State, path: Path) -> Any:
        """See the base: random bytes, as many as the state has."""
        return fio.transfer(self._best["write"], "write", path, self._size)

    def load(self, path: Path) -> Any:
        """See the base."""
        return fio.transfer(self._best["read"], "read", path, self._size)

    def __str__(self) -> str:
        return f"read {self._best['read']}; write {self._best['write']}"


class FioAsMuchMemory(Tool):
    """fio with as much memory as the state: the limit for tensors, which do not fit into the CPU's cache."""

    name = "fio, as much memory"
    suffix = ".raw"

    def __init__(self, size: int) -> None:
        self._size = size
        # An op of one MiB for each MiB of the state, all in flight: the buffers are as large as the state.
        self._setting = fio.FioSetting("libaio", 1 << 20, size >> 20, huge=False)

    def save(self, state: State, path: Path) -> Any:
        """See the base."""
        return fio.transfer(self._setting, "write", path, self._size)

    def load(self, path: Path) -> Any:
        """See the base."""
        return fio.transfer(self._setting, "read", path, self._size)
