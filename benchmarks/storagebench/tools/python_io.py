"""Plain Python: open, readinto, write, fsync; preadv on a direct descriptor for single blocks."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from storagebench.settings import PAGE_BYTES
from storagebench.tools.base import OneCall, Tool, synced_write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from common.measure import Action

_THREADS = 32


class PythonIo(Tool):
    """The interpreter's own files: buffered, one thread."""

    def __init__(self) -> None:
        super().__init__("python", "comparison")

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base; the old file is gone already, so ``wb`` creates it."""
        return self._write(source, path, "wb")

    def overwrite(self, source: torch.Tensor, path: Path) -> Action:
        """See the base; ``r+b`` keeps the old blocks."""
        return self._write(source, path, "r+b")

    def _write(self, source: torch.Tensor, path: Path, mode: str) -> Action:
        view = source.numpy().data

        def action() -> None:
            with path.open(mode, buffering=0) as file:
                at = 0
                while at < len(view):
                    # Linux moves at most 2 GiB less a page in one call.
                    at += file.write(view[at:])
                os.fsync(file.fileno())

        return action

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        view = target.numpy().data

        def action() -> None:
            with path.open("rb", buffering=0) as file:
                at = 0
                while at < len(view):
                    at += file.readinto(view[at:])

        return action

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base; the tensors are adjacent, so they are written one after the other."""
        views = [source.numpy().data for source in sources]
        return synced_write(path, lambda file: [file.write(view) for view in views])

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base; the tensors are adjacent, so they are read one after the other."""
        views = [target.numpy().data for target in targets]

        def action() -> None:
            with path.open("rb") as file:
                for view in views:
                    file.readinto(view)

        return action

    def call(self, target: torch.Tensor, path: Path) -> OneCall:
        """See the base: one preadv on an open direct descriptor, the least that Python can do."""
        return _DirectCall(target, path)

    def in_flight(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: preadv on 32 threads."""
        views = [target.numpy().data for target in targets]

        def action() -> None:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                with ThreadPoolExecutor(_THREADS) as pool:
                    list(pool.map(lambda view, at: os.preadv(descriptor, [view], at), views, offsets))
            finally:
                os.close(descriptor)

        return action


class _DirectCall(OneCall):
    def __init__(self, target: torch.Tensor, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._target = target.numpy().data
        # Direct reads need aligned memory even where the row's is not.
        self._views = [memoryview(mmap.mmap(-1, PAGE_BYTES))]

    def read_at(self, offset: int) -> None:
        os.preadv(self._descriptor, self._views, offset)
        self._target[:] = self._views[0]

    def close(self) -> None:
        os.close(self._descriptor)
