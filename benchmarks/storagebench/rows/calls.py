"""Single 4 KiB blocks: the fixed cost of one call, and thousands of asynchronous reads at once."""

from __future__ import annotations

import time
from statistics import median, quantiles
from typing import TYPE_CHECKING

import numpy as np
import torch

from common import cache, memory
from common.measure import Sample, timed
from storagebench import data
from storagebench.rows.base import PinnedCopies, Row, Unit
from storagebench.settings import PAGE_BYTES
from storagebench.tools.fio_job import FioJob

if TYPE_CHECKING:
    from storagebench.tools.base import OneCall, Tool

_CHECKED_CALLS = 64
_PERCENT = 100


class _Blocks(Row):
    group = "calls"

    def _random_offsets(self, count: int) -> list[int]:
        pages = np.random.default_rng().integers(0, self.bench.settings.large_bytes // PAGE_BYTES, count)
        return [int(page) * PAGE_BYTES for page in pages]

    def _check(self, name: str, got: torch.Tensor, offset: int) -> None:
        if not torch.equal(got, self.bench.source[offset : offset + PAGE_BYTES]):
            raise data.Mismatch(f"{name}: wrong bytes from offset {offset}")


class SmallCall(_Blocks):
    """One synchronous direct read of 4 KiB, over and over at random offsets."""

    key = "small-call"
    title = "one direct 4 KiB read from Python (median of a round)"
    unit: Unit = "us"

    def prepare(self) -> None:
        """See the base."""
        self._target = data.fill(memory.pinned(PAGE_BYTES), self.bench.source[:PAGE_BYTES])

    def close(self) -> None:
        """See the base."""
        del self._target

    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """See the base; 64 further calls outside the timing are verified."""
        del every_byte
        count, path = self.bench.settings.call_count, self.bench.readable(".raw")
        if isinstance(tool, FioJob):
            cache.make_cold(path)
            return timed(tool.random_blocks(path, self.bench.settings.large_bytes, count), 0)[0]
        copy = tool.pinned_copy(self._target)
        target = self._target if copy is None else copy
        call = tool.call(target, path)
        try:
            cache.make_cold(path)
            sample = _calls(call, self._random_offsets(count))
            for offset in self._random_offsets(_CHECKED_CALLS):
                target.zero_()
                call.read_at(offset)
                self._check(tool.name, target, offset)
        finally:
            call.close()
            if copy is not None:
                tool.free_pinned(copy)
        return sample

    def cost(self, sample: Sample) -> float:
        """See the base: the median latency of the round."""
        return sample.extra["median_us"]

    def metric(self, sample: Sample) -> float:
        """See the base."""
        return sample.extra["median_us"]


def _calls(call: OneCall, offsets: list[int]) -> Sample:
    """Time every call by itself, after a few that are not counted."""
    for offset in offsets[:8]:
        call.read_at(offset)
    latencies: list[int] = []

    def action() -> None:
        clock, read_at, note = time.perf_counter_ns, call.read_at, latencies.append
        for offset in offsets:
            start = clock()
            read_at(offset)
            note(clock() - start)

    sample, _ = timed(action, len(offsets) * PAGE_BYTES)
    sample.extra["median_us"] = median(latencies) / 1e3
    sample.extra["p99_us"] = quantiles(latencies, n=_PERCENT)[-1] / 1e3
    return sample


class InFlight(_Blocks):
    """Thousands of asynchronous 4 KiB reads at random offsets, all started before the first wait."""

    key = "in-flight"
    title = "asynchronous 4 KiB reads, all started before the first wait"
    unit: Unit = "reads/s"

    def prepare(self) -> None:
        """See the base."""
        self._memory = data.fill(
            memory.pinned(self.bench.settings.in_flight_count * PAGE_BYTES),
            self.bench.source[: self.bench.settings.in_flight_count * PAGE_BYTES],
        )
        self._pinned_copies = PinnedCopies()

    def close(self) -> None:
        """See the base."""
        self._pinned_copies.free()
        del self._memory

    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """See the base; every block is compared in every round."""
        del every_byte
        path = self.bench.readable(".raw")
        offsets = self._random_offsets(self.bench.settings.in_flight_count)
        targets = list(self._memory_of(tool).zero_().view(-1, PAGE_BYTES).unbind())
        action = tool.in_flight(targets, offsets, path)
        cache.make_cold(path)
        sample, _ = timed(action, len(targets) * PAGE_BYTES)
        if tool.group != "fio":
            for target, offset in zip(targets, offsets, strict=True):
                self._check(tool.name, target, offset)
        return sample

    def metric(self, sample: Sample) -> float:
        """See the base."""
        return sample.bytes_moved / PAGE_BYTES / sample.wall_s

    def _memory_of(self, tool: Tool) -> torch.Tensor:
        copy = self._pinned_copies.of(tool, self._memory)
        return self._memory if copy is None else copy
