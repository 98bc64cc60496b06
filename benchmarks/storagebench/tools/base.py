"""The interface of a tool.

Every method prepares one measurement and returns the callable to time. Opening a handle or building a command line
is not timed. A method that a tool does not support raises `NotOffered`, and the row reports that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import torch

from common.not_offered import NotOffered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from common.measure import Action

Group = Literal["deepnvme", "fio", "DeepSpeed", "comparison"]
Suffix = Literal[".raw", ".npy", ".pt"]


class Tool:
    """One way to move tensors; see the module for the rules.

    Args:
        name: as printed in the tables.
        group: which family it belongs to; ratios are taken against ``fio`` and ``DeepSpeed``.
    """

    # Suffix of the file with the same contents in this tool's own format.
    suffix: Suffix = ".raw"

    def __init__(self, name: str, group: Group) -> None:
        self.name = name
        self.group = group

    def settings(self) -> str:
        """Return the settings in use, for the record."""
        return ""

    def pinned_copy(self, source: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of `source` in the tool's own pinned memory, or None to use the row's."""
        return None

    def free_pinned(self, tensor: torch.Tensor) -> None:
        """Free memory from `pinned_copy`."""

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """Write all of `source` to `path`, which need not exist, and sync it."""
        raise self._not_offered("no durable write")

    def overwrite(self, source: torch.Tensor, path: Path) -> Action:
        """Write `source` over an existing file of the same size, in place, and sync it."""
        return self.write(source, path)

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """Fill all of `target` from the start of `path`."""
        raise self._not_offered("no read into a given tensor")

    def load(self, size: int, path: Path) -> Action:
        """Return the `size` bytes of `path` as a new tensor."""
        target = torch.empty(size, dtype=torch.uint8)
        read = self.read(target, path)

        def action() -> object:
            done = read()
            return target if done is None else done

        return action

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """Write every tensor at its offset of one file and sync the file."""
        raise self._not_offered("no write of many tensors")

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """Fill every tensor from its offset of one file; returns the tensors if they are new."""
        raise self._not_offered("no read of many tensors")

    def call(self, target: torch.Tensor, path: Path) -> OneCall:
        """Return a way to read one 4 KiB block at a time, direct."""
        raise self._not_offered("no direct read of one block")

    def in_flight(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """Start a read for every tensor before waiting for any."""
        raise self._not_offered("no asynchronous read")

    def close(self) -> None:
        """Release threads, handles and memory."""

    def _not_offered(self, what: str) -> NotOffered:
        return NotOffered(f"{self.name} has {what}")


class OneCall:
    """Repeated reads of one block into the same memory."""

    def read_at(self, offset: int) -> None:
        """Read the block at `offset`."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""


def synced_write(path: Path, write: Callable[[BinaryIO], object]) -> Action:
    """Create a file with `write` and sync it."""

    def action() -> None:
        with path.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    return action
