"""fio at its best settings for one engine, chosen by a sweep for each direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import cache, fio, hugepages
from common.not_offered import NotOffered
from storagebench.settings import MIB, PAGE_BYTES
from storagebench.sweep import Choice, best_setting
from storagebench.tools.base import OneCall, Tool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Literal

    import torch

    from common.measure import Action, Sample
    from storagebench.settings import Settings

_IN_FLIGHT_DEPTH = 128
_WHOLE_BLOCK_BYTES = MIB


@dataclass
class Sweeps:
    """The chosen settings of one engine, and whether its buffers are in huge pages."""

    huge: bool
    read: Choice[fio.FioSetting]
    write: Choice[fio.FioSetting]


class FioJob(Tool):
    """One fio engine. It uses its own memory instead of the row's."""

    def __init__(self, engine: fio.Engine, sweeps: Sweeps) -> None:
        super().__init__(f"fio {engine}", "fio")
        self._engine = engine
        self._sweeps = sweeps

    def settings(self) -> str:
        """See the base."""
        return f"read: {self._sweeps.read.best}; write: {self._sweeps.write.best}"

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base; fio writes random blocks of its own, as many bytes as `source` has."""
        return self._transfer("write", source.numel(), path)

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return self._transfer("read", target.numel(), path)

    def load(self, size: int, path: Path) -> Action:
        """See the base."""
        return lambda: fio.transfer(self._sweeps.read.best, "read", path, size)

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: the same bytes in large blocks, since fio has no tensors."""
        return self._transfer("write", sum(source.numel() for source in sources), path)

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: the same bytes in large blocks, since fio has no tensors."""
        return self._transfer("read", sum(target.numel() for target in targets), path)

    def random_blocks(self, path: Path, size: int, count: int) -> Action:
        """Read `count` random blocks one at a time and report their latencies."""
        setting = fio.FioSetting(self._engine, PAGE_BYTES, 1, self._sweeps.huge)
        return lambda: fio.random_reads(setting, path, size, count)

    def call(self, target: torch.Tensor, path: Path) -> OneCall:
        """See the base; fio cannot be called block by block, the row uses `random_blocks`."""
        raise NotOffered("fio measures its own calls")

    def in_flight(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: as many random blocks, at depth 128."""
        setting = fio.FioSetting(self._engine, PAGE_BYTES, _IN_FLIGHT_DEPTH, self._sweeps.huge)
        size = path.stat().st_size // PAGE_BYTES * PAGE_BYTES
        return lambda: fio.random_reads(setting, path, size, len(targets))

    def _transfer(self, rw: Literal["read", "write"], size: int, path: Path) -> Action:
        setting = self._sweeps.read.best if rw == "read" else self._sweeps.write.best

        def action() -> Sample:
            return fio.transfer(setting, rw, path, size)

        return action


class FioAsMuchMemory(FioJob):
    """libaio with buffers as large as the tensor, so that its bytes end up in memory and not in a cache.

    The other jobs reuse much less memory, which may stay in a CPU cache. That is faster than filling memory,
    and no program can keep its tensors there.
    """

    NAME = "fio libaio, as much memory"

    def __init__(self, sweeps: Sweeps) -> None:
        super().__init__("libaio", sweeps)
        self.name = self.NAME

    def settings(self) -> str:
        """See the base."""
        memory = " iomem=mmaphuge" if self._sweeps.huge else ""
        return f"libaio bs={_WHOLE_BLOCK_BYTES >> 10}k iodepth=as many as the tensor has{memory}"

    def _transfer(self, rw: Literal["read", "write"], size: int, path: Path) -> Action:
        depth = max(1, size // _WHOLE_BLOCK_BYTES)
        setting = fio.FioSetting("libaio", _WHOLE_BLOCK_BYTES, depth, self._sweeps.huge)
        return lambda: fio.transfer(setting, rw, path, size)

    def load(self, size: int, path: Path) -> Action:
        """See the base."""
        return self._transfer("read", size, path)


def buffer_bytes_max(settings: Settings) -> int:
    """Return the huge pages, in bytes, that fio's largest job needs.

    That is twice the size of its buffers and a little for alignment: fio allocates them, then forks the process
    that uses them. With less, the kernel refuses them in the middle of a job.
    """
    largest = max(max(settings.fio_block_bytes) * max(settings.fio_depths), settings.large_bytes)
    return 2 * largest + 8 * MIB


def sweep(engine: fio.Engine, settings: Settings, scratch: Path, readable: Path) -> Sweeps:
    """Find the best block size and depth of `engine` for reading `readable` and for writing a new file."""
    size = settings.sweep_bytes
    huge = hugepages.free_bytes() >= buffer_bytes_max(settings)
    target = scratch / "sweep.raw"

    def read(setting: fio.FioSetting) -> float:
        cache.wait_for_writeback()
        return fio.transfer(setting, "read", readable, size).wall_s

    def write(setting: fio.FioSetting) -> float:
        target.unlink(missing_ok=True)
        cache.wait_for_writeback()
        return fio.transfer(setting, "write", target, size).wall_s

    grid = [
        fio.FioSetting(engine, block, depth, huge)
        for block in settings.fio_block_bytes
        for depth in settings.fio_depths
    ]
    chosen = [
        best_setting(grid, trial, finalists=settings.finalists, final_trials=settings.final_trials)
        for trial in (read, write)
    ]
    target.unlink(missing_ok=True)
    return Sweeps(huge, *chosen)
