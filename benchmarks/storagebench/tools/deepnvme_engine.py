"""deepnvme: one engine for each backend, with the defaults of everything else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from common import memory
from storagebench.tools.base import OneCall, Tool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from common.measure import Action

Backend = Literal["auto", "io_uring", "aio", "threads"]
BACKENDS: tuple[Backend, ...] = ("io_uring", "aio", "threads")

# fsync of the file and of its directory, as fio's end_fsync and the os.fsync of the others, or stronger.
_DURABILITY = "full"


class DeepnvmeEngine(Tool):
    """`deepnvme.Engine(backend=...)`, all other settings at their defaults."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(f"deepnvme {backend}", "deepnvme")
        import deepnvme  # noqa: PLC0415

        self._engine = deepnvme.Engine(backend=backend)

    def settings(self) -> str:
        """See the base."""
        engine = self._engine
        return f"workers={engine.workers} queue_depth={engine.queue_depth} block={engine.block_bytes >> 10}k"

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return lambda: _none(self._engine.write(source, path, durability=_DURABILITY))

    def overwrite(self, source: torch.Tensor, path: Path) -> Action:
        """See the base: an offset makes it a change in place."""
        return lambda: _none(self._engine.write(source, path, 0, durability=_DURABILITY))

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return lambda: _none(self._engine.read(target, path))

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: one batch."""
        items = [(path, offset, source) for source, offset in zip(sources, offsets, strict=True)]
        return lambda: _none(self._engine.write_batch(items, durability=_DURABILITY))

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: one batch."""
        items = [(path, offset, target) for target, offset in zip(targets, offsets, strict=True)]
        return lambda: _none(self._engine.read_batch(items))

    def call(self, target: torch.Tensor, path: Path) -> OneCall:
        """See the base: by name, which opens the file in each call."""
        return _Call(self._engine, target, path)

    def in_flight(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: one `start_read` for each tensor, then one `result` for each."""
        start = self._engine.start_read

        def action() -> None:
            pending = [start(target, path, offset) for target, offset in zip(targets, offsets, strict=True)]
            for one in pending:
                one.result()

        return action

    def close(self) -> None:
        """See the base."""
        self._engine.close()


class DeepnvmeDescriptor(DeepnvmeEngine):
    """The same on a descriptor that stays open, for the rows of single blocks."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.name = f"deepnvme {backend}, open file"

    def call(self, target: torch.Tensor, path: Path) -> OneCall:
        """See the base: by descriptor."""
        return _Call(self._engine, target, os.open(path, os.O_RDONLY))

    def in_flight(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: one batch, started in one call, on a descriptor."""

        def action() -> None:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                items = [(descriptor, offset, target) for target, offset in zip(targets, offsets, strict=True)]
                self._engine.start_read_batch(items).result()
            finally:
                os.close(descriptor)

        return action


class DeepnvmeOneLarge(DeepnvmeEngine):
    """The bytes of many tensors as one request of pinned memory: the baseline for the batches."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.name = f"deepnvme {backend}, one large"

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base; returns the one tensor."""
        whole = memory.pinned(sum(target.numel() for target in targets)).zero_()

        def action() -> torch.Tensor:
            self._engine.read(whole, path)
            return whole

        return action

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base."""
        whole = memory.pinned(sum(source.numel() for source in sources))
        at = 0
        for source in sources:
            whole[at : at + source.numel()] = source
            at += source.numel()
        return self.write(whole, path)


class _Call(OneCall):
    def __init__(self, engine: Any, target: torch.Tensor, file: Path | int) -> None:  # noqa: ANN401
        self._engine, self._target, self._file = engine, target, file

    def read_at(self, offset: int) -> None:
        self._engine.read(self._target, self._file, offset)

    def close(self) -> None:
        if isinstance(self._file, int):
            os.close(self._file)


def _none(_returned: int) -> None:
    """Drop a byte count, so that the action has no value to verify."""
