"""Items of a distributed load that pass through buffers, in groups that fit into a limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deepnvme._checkpoint.dcp.pieces import pieces
from deepnvme._checkpoint.shared_targets import compare
from deepnvme._utils.capture import relaxed_capture_for
from deepnvme._utils.tensors import copy_exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import ReadItem

    from deepnvme._checkpoint.dcp.pieces import Piece
    from deepnvme._checkpoint.dcp.shard import Shard

# Memory for items that pass through a buffer. All others are read in place.
COPIED_BYTES_MAX = 64 << 20


@dataclass(eq=False)
class ItemCopy:
    """An item that passes through a buffer.

    It is a part of rows, or one of two tied weights, or its target has another dtype, another device, or lazy signs.
    """

    shard: Shard
    name: str
    item: ReadItem
    target: torch.Tensor
    dtype: torch.dtype
    shape: list[int]
    is_tied: bool
    """Whether another item has filled the target. This checkpoint may have untied the two."""
    sources: dict[Piece, torch.Tensor] = field(default_factory=dict)

    def pieces(self) -> Iterator[Piece]:
        """Split the item into pieces that fit into the buffers."""
        if self.target.numel():
            box = list(self.item.storage_offsets), list(self.item.lengths)
            yield from pieces(self.shape, *box, COPIED_BYTES_MAX // self.dtype.itemsize)

    def request(self, piece: Piece) -> None:
        """Request a piece from the file."""
        source = self.sources[piece] = torch.empty(piece.shape, dtype=self.dtype)
        self.shard.request(self.name, piece.start * self.dtype.itemsize, source)

    def finish(self, piece: Piece) -> None:
        """Copy a piece into the target, or compare it."""
        source = piece.of_source(self.sources.pop(piece), list(self.item.storage_offsets), list(self.item.lengths))
        target = piece.of_target(self.target)
        if self.is_tied:
            compare(f"{self.shard.path}: {self.name}", target, source)
            return
        with relaxed_capture_for(target.device):
            copy_exactly(target, source)


def groups_of(copies: list[ItemCopy]) -> Iterator[list[tuple[ItemCopy, Piece]]]:
    """Group the pieces of copies, so that the buffers of each group stay within the limit."""
    group: list[tuple[ItemCopy, Piece]] = []
    nbytes = 0
    for copy in copies:
        for piece in copy.pieces():
            if group and nbytes + piece.elements * copy.dtype.itemsize > COPIED_BYTES_MAX:
                yield group
                group, nbytes = [], 0
            group.append((copy, piece))
            nbytes += piece.elements * copy.dtype.itemsize
    if group:
        yield group
