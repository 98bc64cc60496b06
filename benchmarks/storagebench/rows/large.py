"""One large tensor: durable writes and cold reads, from and to pinned, plain and fresh memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common import cache, memory
from common.measure import timed
from storagebench import data, formats
from storagebench.rows.base import Bench, PinnedCopies, Row

if TYPE_CHECKING:
    from pathlib import Path

    from common.measure import Sample
    from storagebench.tools.base import Tool


class _Large(Row):
    """Shared: the row's own tensor, and the copies in tools' own pinned memory."""

    group = "large"
    is_pinned = False

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._tensor: torch.Tensor | None = None
        self._pinned_copies = PinnedCopies()

    def prepare(self) -> None:
        """See the base."""
        allocate = memory.pinned if self.is_pinned else memory.plain
        self._tensor = data.fill(allocate(self.bench.settings.large_bytes), self.bench.source)

    def close(self) -> None:
        """See the base."""
        self._pinned_copies.free()
        self._tensor = None

    def memory_of(self, tool: Tool) -> torch.Tensor:
        """Return the tensor that this tool uses in this row."""
        if self._tensor is None:
            raise RuntimeError("prepare() comes first")
        copy = self._pinned_copies.of(tool, self._tensor) if self.is_pinned else None
        return self._tensor if copy is None else copy


class _LargeWrite(_Large):
    over_existing = False

    def _path(self) -> Path:
        return self.bench.scratch / f"{self.key}.raw"

    def prepare(self) -> None:
        """See the base."""
        super().prepare()
        if self.over_existing:
            formats.save(self.bench.source, self._path(), ".raw")

    def close(self) -> None:
        """See the base."""
        super().close()
        self._path().unlink(missing_ok=True)

    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """See the base.

        Before the clock starts, the old file is removed unless it is written over, and pending writes end.
        """
        source, path = self.memory_of(tool), self._path()
        data.stamp(source)
        if self.over_existing:
            action = tool.overwrite(source, path)
        else:
            path.unlink(missing_ok=True)
            action = tool.write(source, path)
        cache.wait_for_writeback()
        sample, _ = timed(action, source.numel())
        if tool.group != "fio":
            formats.check(tool.name, path, tool.suffix, source, every_byte=every_byte)
        if not self.over_existing:
            path.unlink()
        return sample


class _LargeRead(_Large):
    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """See the base; the file is cold before the clock starts."""
        target, path = self.memory_of(tool), self.bench.readable(tool.suffix)
        data.stamp(target)
        action = tool.read(target, path)
        cache.make_cold(path)
        sample, _ = timed(action, target.numel())
        if tool.group != "fio":
            data.check_memory(tool.name, target, self.bench.source, every_byte=every_byte)
        return sample


class WriteNewPinned(_LargeWrite):
    """Durable write of pinned memory into a new file."""

    key = "write-new-pinned"
    title = "durable write, new file, pinned memory"
    is_pinned = True


class WriteOverPinned(_LargeWrite):
    """Durable write of pinned memory over an existing file."""

    key = "write-over-pinned"
    title = "durable write, over an existing file, pinned memory"
    is_pinned = True
    over_existing = True


class WriteNewPlain(_LargeWrite):
    """Durable write of an ordinary tensor into a new file."""

    key = "write-new-plain"
    title = "durable write, new file, ordinary tensor"


class ReadPinned(_LargeRead):
    """Cold read into pinned memory."""

    key = "read-pinned"
    title = "cold read, pinned memory"
    is_pinned = True


class ReadPlain(_LargeRead):
    """Cold read into an ordinary tensor whose pages exist."""

    key = "read-plain"
    title = "cold read, ordinary tensor"


class ReadFresh(Row):
    """Cold read into memory that does not exist before: page faults are part of it."""

    key = "read-fresh"
    group = "large"
    title = "cold read, ordinary tensor made for it (page faults included)"

    def prepare(self) -> None:
        """See the base; each measurement makes its own tensor."""

    def close(self) -> None:
        """See the base."""

    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """See the base."""
        size, path = self.bench.settings.large_bytes, self.bench.readable(tool.suffix)
        action = tool.load(size, path)
        cache.make_cold(path)
        sample, loaded = timed(action, size)
        if isinstance(loaded, torch.Tensor):
            data.check_memory(tool.name, loaded, self.bench.source, every_byte=every_byte)
        return sample
