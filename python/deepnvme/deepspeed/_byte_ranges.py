"""Track the bytes of pending operations, so that overlapping ones keep their order.

DeepSpeed runs the operations of a handle one after another. Here they run concurrently. The difference shows only where
one operation accesses bytes that another one writes, so those keep the order of submission.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable


class _FileRanges:
    """The ranges of one file: written ones, disjoint and sorted, and the hull of those read."""

    __slots__ = ("read_end", "read_start", "write_ends", "write_starts")

    def __init__(self) -> None:
        self.write_starts: list[int] = []
        self.write_ends: list[int] = []
        self.read_start = 0
        self.read_end = 0

    def overlaps_write(self, start: int, end: int) -> bool:
        # Disjoint and sorted, so only the last one that starts before `end` can extend beyond `start`.
        index = bisect_left(self.write_starts, end)
        return index > 0 and self.write_ends[index - 1] > start

    def overlaps_read(self, start: int, end: int) -> bool:
        return self.read_start < end and start < self.read_end


class ByteRanges:
    """The byte ranges that a set of pending operations reads and writes."""

    __slots__ = ("_files",)

    def __init__(self) -> None:
        self._files: dict[Hashable, _FileRanges] = {}

    def conflicts(self, file: Hashable, start: int, end: int, *, writes: bool) -> bool:
        """Whether an operation on these bytes must wait for the set. Reads do not wait for reads."""
        ranges = self._files.get(file)
        if ranges is None or start >= end:
            return False
        return ranges.overlaps_write(start, end) or (writes and ranges.overlaps_read(start, end))

    def add(self, file: Hashable, start: int, end: int, *, writes: bool) -> None:
        """Record an operation that conflicts with none of the set."""
        if start >= end:
            return
        ranges = self._files.setdefault(file, _FileRanges())
        if writes:
            insort(ranges.write_starts, start)
            insort(ranges.write_ends, end)
        elif ranges.read_start == ranges.read_end:
            ranges.read_start, ranges.read_end = start, end
        else:
            ranges.read_start = min(ranges.read_start, start)
            ranges.read_end = max(ranges.read_end, end)

    def forget(self, file: Hashable) -> None:
        """Forget a file: all operations of the set on it are done."""
        self._files.pop(file, None)
