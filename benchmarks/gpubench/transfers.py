"""The rows `read` and `write`: one tensor between a GPU and a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepnvme
import torch

from common import cache
from common.measure import Sample, timed
from gpubench import baselines, ours
from gpubench.data import Mismatch, compare_file, random_bytes, size_text
from gpubench.rows import RoundLimits, RowResult, construct, make_cold_or_note, run_rounds
from gpubench.tool import Setup, Tool

KINDS: tuple[type[Tool], ...] = (
    ours.Bounce,
    ours.Gds,
    ours.HostMemory,
    ours.ThenCopy,
    baselines.PythonCopy,
    baselines.DeepSpeed,
    baselines.Kvikio,
    baselines.Fio,
)


def read(setup: Setup, row: RowResult, limits: RoundLimits) -> RowResult:
    """Fill in the row `read`."""
    return Transfers(setup).read(row, limits)


def write(setup: Setup, row: RowResult, limits: RoundLimits) -> RowResult:
    """Fill in the row `write`."""
    return Transfers(setup).write(row, limits)


class Transfers:
    """Reads and writes of one tensor of random bytes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.host = random_bytes(setup.nbytes)

    def read(self, row: RowResult, limits: RoundLimits) -> RowResult:
        """Fill a tensor from a cold file."""
        row.title = f"cold read of {size_text(self.setup.nbytes)} into a tensor on the GPU"
        row.ours, row.reference = ours.BOUNCE, ours.HOST
        tools = construct(row, KINDS, self.setup, limits)
        path = self.setup.scratch / "read.bin"
        deepnvme.write(self.host, path, durability="data")
        targets = {
            "gpu": self.setup.gpu.tensor(self.host),
            "host": self.setup.gpu.pinned(self.setup.nbytes),
            "none": None,
        }

        def once(one: Tool, is_first: bool) -> Sample:  # noqa: FBT001 - the first round, or a later one
            target: Any = targets[one.where]
            if is_first:
                one.prepare_read(target, path, lambda: make_cold_or_note(path, row))
            self._overwrite(one, target)
            action = one.read(target, path)
            make_cold_or_note(path, row)
            sample = self._timed(action)
            self._verify_read(one, target)
            return sample

        try:
            return run_rounds(row, tools, limits, once)
        finally:
            path.unlink(missing_ok=True)

    def write(self, row: RowResult, limits: RoundLimits) -> RowResult:
        """Write a tensor to a new file, durably."""
        row.title = f"durable write of {size_text(self.setup.nbytes)} from a tensor on the GPU"
        row.ours, row.reference = ours.BOUNCE, ours.HOST
        tools = construct(row, KINDS, self.setup, limits)
        path = self.setup.scratch / "write.bin"
        pinned = self.setup.gpu.pinned(self.setup.nbytes)
        pinned.copy_(self.host)
        sources = {"gpu": self.setup.gpu.tensor(self.host), "host": pinned, "none": None}

        def once(one: Tool, is_first: bool) -> Sample:  # noqa: FBT001 - the first round, or a later one
            source: Any = sources[one.where]
            path.unlink(missing_ok=True)
            if is_first:
                one.prepare_write(source, path)
                path.unlink(missing_ok=True)
            action = one.write(source, path)
            cache.wait_for_writeback()
            sample = self._timed(action)
            if one.where != "none":
                compare_file(path, self.host, whole=is_first)
            return sample

        try:
            return run_rounds(row, tools, limits, once)
        finally:
            path.unlink(missing_ok=True)

    def _timed(self, action: Callable[[], object]) -> Sample:
        def whole() -> object:
            value = action()
            self.setup.gpu.wait()
            return value

        return timed(whole, self.setup.nbytes)[0]

    def _overwrite(self, one: Tool, target: Any) -> None:
        if one.where == "gpu":
            self.setup.gpu.overwrite(target)
        elif one.where == "host":
            target.fill_(0xA5)

    def _verify_read(self, one: Tool, target: Any) -> None:
        if one.where == "none":
            return
        is_right = self.setup.gpu.same(target, self.host) if one.where == "gpu" else torch.equal(target, self.host)
        if not is_right:
            raise Mismatch(f"{one.name} read other bytes than the file has")
