"""torch.save and torch.load: of one tensor, and of a list of many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.not_offered import NotOffered
from storagebench.tools.base import Suffix, Tool, synced_write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from common.measure import Action


class TorchIo(Tool):
    """`torch.save` and `torch.load` with their defaults."""

    suffix: Suffix = ".pt"

    def __init__(self) -> None:
        super().__init__("torch", "comparison")

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return synced_write(path, lambda file: torch.save(source, file))

    def overwrite(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        raise NotOffered("torch.save cuts the old file first")

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base: the mapped tensor is copied into the tensor."""

        def action() -> None:
            target.copy_(torch.load(path, mmap=True))

        return action

    def load(self, size: int, path: Path) -> Action:
        """See the base."""
        return lambda: torch.load(path)

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base."""
        return synced_write(path, lambda file: torch.save(list(sources), file))

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base."""
        return lambda: torch.load(path)
