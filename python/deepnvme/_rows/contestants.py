"""The contestants of ``deepnvme rows bench`` in this process: a table, and a mapped file."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepnvme._rows.region import Region
    from deepnvme._rows.row_store import RowStore

# A turn ends after this time, with the gathers that it has made.
TURN_S_MAX = 5


class Turn(NamedTuple):
    """The gathers of a contestant in a round."""

    rows: int
    seconds: float
    latencies_s: list[float] | None
    """The time of each gather; ``None`` for fio, which makes no gathers."""
    cpu_s: float
    bytes_read: int | None
    """Bytes read from disk; ``None`` if the kernel does not tell."""
    hits: float | None = None
    """The fraction of rows found in memory."""


class Contestant(ABC):
    """One way to gather rows.

    Attributes:
        name: its name in the results.
    """

    name: str

    @abstractmethod
    def turn(self, ids: list[torch.Tensor], number: int) -> Turn:
        """Gather these rows in the round with this number."""


class StoreContestant(Contestant):
    """Gathers from a ``RowStore``, into the same tensor each time."""

    name = "deepnvme"

    def __init__(self, store: RowStore, count: int) -> None:
        self._store = store
        self._out = torch.empty((count, *store.shape[1:]), dtype=store.gathered_dtype)

    def turn(self, ids: list[torch.Tensor], number: int) -> Turn:  # noqa: ARG002 (fio's)
        """Gather these rows."""
        before = self._store.stats()
        turn = _timed(ids, lambda rows: self._store.gather(rows, out=self._out))
        after = self._store.stats()
        return turn._replace(
            bytes_read=after.bytes_read - before.bytes_read,
            hits=(after.hits - before.hits) / max(after.rows - before.rows, 1),
        )


class MmapContestant(Contestant):
    """Indexes a tensor on a mapped file.

    Raises:
        UnsupportedError: the rows are not in one place of the file.
    """

    name = "mmap"

    def __init__(self, region: Region, rows: int, row_bytes: int, count: int) -> None:
        if region.first_row is None:
            msg = "the rows are packed, or in several tensors"
            raise UnsupportedError(msg)
        self._path, self._begin, self._end = region.path, region.first_row, region.first_row + rows * row_bytes
        self._shape = rows, row_bytes
        self._out = torch.empty((count, row_bytes), dtype=torch.uint8)

    def turn(self, ids: list[torch.Tensor], number: int) -> Turn:  # noqa: ARG002 (fio's)
        """Gather these rows. Pages of a mapped file cannot leave the page cache, so it is mapped for a turn."""
        mapped = torch.from_file(self._path, shared=False, size=self._end, dtype=torch.uint8)
        table = mapped[self._begin :].view(self._shape)
        before = _bytes_read()
        turn = _timed(ids, lambda rows: torch.index_select(table, 0, rows, out=self._out))
        after = _bytes_read()
        return turn._replace(bytes_read=None if before is None or after is None else after - before)


def drop_pages(files: list[str]) -> None:
    """Ask the kernel to drop the pages of these files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _timed(ids: list[torch.Tensor], gather: Callable[[torch.Tensor], object]) -> Turn:
    """Call ``gather`` for each tensor of ids, and measure each call."""
    took: list[float] = []
    rows = 0
    cpu = time.process_time()
    first = began = time.perf_counter()
    for one in ids:
        gather(one)
        ended = time.perf_counter()
        took.append(ended - began)
        rows += len(one)
        if ended - first > TURN_S_MAX:
            break
        began = ended
    return Turn(rows, sum(took), took, time.process_time() - cpu, None)


def _bytes_read() -> int | None:
    """Return the bytes that this process has read from disks."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return None
