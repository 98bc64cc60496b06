"""Ten thousand tensors of 4 to 64 KiB, adjacent in one file: one batch read cold, one batch written durably.

The sizes are multiples of 1 KiB: DeepSpeed's handle loses the tails of other sizes without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from common import cache, memory
from common.measure import timed
from storagebench import data
from storagebench.rows.base import Bench, PinnedCopies, Row

if TYPE_CHECKING:
    from pathlib import Path

    from common.measure import Sample
    from storagebench.tools.base import Tool

_KIB = 1024
_SMALLEST_KIB, _LARGEST_KIB = 4, 64


class _Small(Row):
    group = "small"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        count = bench.settings.small_count
        kib = np.random.default_rng(1).integers(_SMALLEST_KIB, _LARGEST_KIB + 1, count)
        self._sizes: list[int] = [int(size) * _KIB for size in kib]
        ends = np.cumsum(self._sizes)
        self._offsets: list[int] = [0, *(int(end) for end in ends[:-1])]
        self._bytes = int(ends[-1])
        self._contents = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[torch.Tensor] = []
        self._pinned_copies = PinnedCopies()

    @property
    def path(self) -> Path:
        """The one file of all tensors."""
        return self.bench.scratch / f"{self.key}.raw"

    def prepare(self) -> None:
        """See the base: every tensor is an allocation of its own, as in a state dict."""
        self._contents = data.random_tensor(self._bytes)
        self._tensors = [memory.plain(size) for size in self._sizes]
        for tensor, part in zip(self._tensors, self._parts(self._contents), strict=True):
            tensor.copy_(part)

    def close(self) -> None:
        """See the base."""
        self._pinned_copies.free()
        self._tensors.clear()
        self._contents = torch.empty(0, dtype=torch.uint8)
        for path in self.bench.scratch.glob(f"{self.key}.*"):
            path.unlink()

    def tensors_of(self, tool: Tool) -> list[torch.Tensor]:
        """Return the tensors: ordinary ones, or slices of the tool's own pinned memory."""
        arena = self._pinned_copies.of(tool, self._contents)
        return self._tensors if arena is None else self._parts(arena)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[at : at + size] for at, size in zip(self._offsets, self._sizes, strict=True)]

    def check(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Compare every tensor with the contents."""
        for index, (got, wanted) in enumerate(zip(tensors, self._parts(self._contents), strict=True)):
            if not torch.equal(got, wanted):
                raise data.Mismatch(f"{name}: tensor {index} of {len(tensors)} is wrong")


class SmallRead(_Small):
    """Batch read, cold."""

    key = "small-read"
    title = "cold batch read of small tensors, adjacent in one file"

    def prepare(self) -> None:
        """See the base."""
        super().prepare()
        self.path.write_bytes(self._contents.numpy().data)
        torch.save([part.clone() for part in self._parts(self._contents)], self.path.with_suffix(".pt"))

    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """See the base; every byte is compared in every round."""
        del every_byte
        targets = self.tensors_of(tool)
        for target in targets:
            target[:8] = 0
        path = self.path.with_suffix(".pt" if tool.suffix == ".pt" else ".raw")
        action = tool.read_many(targets, self._offsets, path)
        cache.make_cold(path)
        sample, value = timed(action, self._bytes)
        if isinstance(value, torch.Tensor):
            data.check_memory(tool.name, value, self._contents, every_byte=True)
        elif isinstance(value, list):
            self.check(tool.name, [torch.as_tensor(one) for one in value])
        elif tool.group != "fio":
            self.check(tool.name, targets)
        return sample


class SmallWrite(_Small):
    """Batch write, durable, into a new file."""

    key = "small-write"
    title = "durable batch write of small tensors, adjacent in one new file"

    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """See the base; every byte is compared in every round."""
        del every_byte
        sources = self.tensors_of(tool)
        self.path.unlink(missing_ok=True)
        action = tool.write_many(sources, self._offsets, self.path)
        cache.wait_for_writeback()
        sample, _ = timed(action, self._bytes)
        if tool.suffix == ".pt":
            self.check(tool.name, torch.load(self.path))
        elif tool.group != "fio":
            data.check_file(tool.name, self.path, self._contents, every_byte=True)
        self.path.unlink()
        return sample
