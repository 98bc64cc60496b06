"""The limit of the disk: fio with the same number of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpointbench.states import State
from checkpointbench.tools import Tool
from common import fio
from common.limit import DiskLimit


class Fio(Tool):
    """fio at the best settings of a sweep: the disk's own limit for so many bytes."""

    name = "fio best"
    suffix = ".raw"

    def __init__(self, path: Path, size: int, *, huge: bool) -> None:
        self._limit = DiskLimit.measure(path, size, huge=huge)

    def save(self, state: State, path: Path) -> Any:
        """See the base: random bytes, as many as the state has."""
        return self._limit.write(path)

    def load(self, path: Path) -> Any:
        """See the base."""
        return self._limit.read(path)

    def __str__(self) -> str:
        return str(self._limit)


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
