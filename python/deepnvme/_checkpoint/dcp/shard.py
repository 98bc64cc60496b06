"""Reads from a file of a distributed checkpoint: parts that are compared with its checksums, and copies of items.

An item that cannot be read in place passes through buffers, piece by piece, in groups that fit into a limit.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme._checkpoint.load_into import compare
from deepnvme._checkpoint.load_request import storage_entries, tensor_entries
from deepnvme._deepnvme import _CheckpointReader, _crc64
from deepnvme._utils.devices import relaxed_capture_for
from deepnvme._utils.tensors import copy_exactly
from deepnvme.errors import ChecksumError, CorruptFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem

    from deepnvme._deepnvme import Engine, _Loading

# The fraction of checksum chunks that a sample compares, as in a load of the whole file.
_SAMPLED_FRACTION = 1 / 32
# A shard and its index come from the same save, or one of them was changed later.
_REMEDY = "restore the whole folder from a copy, or load another checkpoint"
# Memory for items that pass through a buffer. All others are read in place.
COPIED_BYTES_MAX = 64 << 20
# As in memory of torch.empty: enough for every dtype, and for vector instructions.
_ALIGNMENT = 64


class Shard:
    """Collects requests. Whole tensors are compared in memory; for parts, the checksum chunks of the file are read."""

    def __init__(
        self, path: Path, engine: Engine | None, verify: str, fingerprint: tuple[int, int] | None = None
    ) -> None:
        self.path = path
        self._verify = verify
        self._reader = _CheckpointReader(path, engine, False, complete=verify == "full")
        if verify != "off":
            self._reader.check(fingerprint)
        if verify == "full" and not self._reader.has_checksums:
            msg = (
                f"{path}: the file has no checksums (DeepnvmeWriter writes them by default), so nothing can be "
                "compared; use verify='off'"
            )
            raise ValueError(msg)
        self._storages = storage_entries(self._reader)
        self._tensors = {entry.name: entry for entry in tensor_entries(self._reader)}
        self._whole: list[Any] = []
        self._ranges: list[tuple[str, int, int]] = []
        self._loading: _Loading | None = None
        self.parts: list[tuple[Path, int, torch.Tensor]] = []
        """Reads of parts of tensors: file, offset and memory. They go into one batch with those of other files."""

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, list[int]]:
        """Return the dtype and sizes of a tensor in the file."""
        if name not in self._tensors:
            raise CorruptFileError(
                f"{self.path}: the file does not contain {name!r}, which deepnvme.json lists; {_REMEDY}"
            )
        entry = self._tensors[name]
        return getattr(torch, entry.dtype), entry.shape

    def raise_mismatch(self, name: str, what: str) -> NoReturn:
        """Report a tensor that contradicts the index."""
        raise CorruptFileError(f"{self.path}: {name!r} {what}; {_REMEDY}")

    def request(self, name: str, start: int, memory: torch.Tensor) -> None:
        """Request the bytes of a tensor from ``start`` on."""
        index = self._tensors[name].storage
        storage = self._storages[index]
        if start + memory.nbytes > storage.nbytes:
            self.raise_mismatch(name, f"has {storage.nbytes} bytes, which is smaller than deepnvme.json says")
        if memory.nbytes == 0:
            return
        if memory.nbytes == storage.nbytes and memory.is_contiguous():
            self._whole.append(((storage.offset, storage.nbytes, [(index, 0)]), memory))
        else:
            self.parts.append((self.path, storage.offset + start, memory))
            self._ranges.append((name, start, memory.nbytes))

    def start(self) -> None:
        """Start to read whole tensors."""
        if self._whole:
            self._loading = self._reader.start(self._whole)

    def finish(self) -> None:
        """Wait for whole tensors, and compare all with checksums. The caller has read the parts.

        More requests may follow.
        """
        if self._loading is not None:
            self._loading.finish(self._verify, None)
        ranges = self._ranges
        self._whole, self.parts, self._ranges, self._loading = [], [], [], None
        if ranges and self._verify != "off" and self._reader.has_checksums:
            self._compare_parts(ranges)

    def _compare_parts(self, ranges: list[tuple[str, int, int]]) -> None:
        texts = dict(self._reader.metadata)
        checksums = json.loads(texts["deepnvme.checksums"])
        cell_bytes = int(checksums["cell_bytes"])
        chunks = sorted(
            {
                (name, chunk)
                for name, start, nbytes in ranges
                for chunk in range(start // cell_bytes, -(-(start + nbytes) // cell_bytes))
            }
        )
        if self._verify != "full":
            chunks = random.sample(chunks, math.ceil(len(chunks) * _SAMPLED_FRACTION))
        for name, chunk in chunks:
            storage = self._storages[self._tensors[name].storage]
            start = chunk * cell_bytes
            offset, length = storage.offset + start, min(cell_bytes, storage.nbytes - start)
            if f"{_crc64(self.path, offset, length):016x}" != checksums["records"][name][chunk * 16 :][:16]:
                msg = (
                    f"{self.path}: {name}: {length} bytes from {offset} on differ from those that were saved "
                    "(CRC-64); verify='off' reads them anyway"
                )
                error = ChecksumError(msg)
                error.offset = offset
                raise error


@dataclass(eq=False)
class BufferedItem:
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

    def request(self, piece: Piece, memory: torch.Tensor) -> None:
        """Request a piece from the file, into the memory of a buffer."""
        source = self.sources[piece] = memory.view(self.dtype).view(piece.shape)
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


def request_groups(items: list[BufferedItem]) -> Iterator[list[tuple[BufferedItem, Piece]]]:
    """Request the pieces of items, group by group. The groups share one buffer.

    Buffers of their own, allocated and freed for each group, would fragment the heap and so exceed the limit.
    """
    if not items:
        return
    # A piece has at least one element.
    buffer_bytes = max(COPIED_BYTES_MAX, *(item.dtype.itemsize for item in items))
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8)
    group: list[tuple[BufferedItem, Piece]] = []
    end = 0
    for item in items:
        for piece in item.pieces():
            nbytes = piece.elements * item.dtype.itemsize
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if start + nbytes > buffer_bytes:
                yield group
                group, start = [], 0
            end = start + nbytes
            item.request(piece, buffer[start:end])
            group.append((item, piece))
    if group:
        yield group


@dataclass(frozen=True)
class Piece:
    """A part of an item's box, and the range of the file that contains it.

    A box is the item's range of indices in each dimension.

    The range has whole rows of the stored tensor: only some of their elements may belong to the box.
    """

    index: tuple[int, ...]
    """The index of the part in the box, in the leading dimensions."""
    first: int
    """The first index of the part in the next dimension."""
    count: int
    """The number of indices in that dimension."""
    start: int
    """The first element of the range."""
    shape: tuple[int, ...]
    """The shape of the range."""

    @property
    def elements(self) -> int:
        """The number of elements in the range."""
        return math.prod(self.shape)

    def of_target(self, target: torch.Tensor) -> torch.Tensor:
        """Return the part of the tensor that the box fills."""
        part = target[self.index]
        return part.narrow(0, self.first, self.count) if part.dim() else part

    def of_source(self, source: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return the elements of the range that belong to the box."""
        outer = len(self.index) + 1
        for dimension in range(1, len(self.shape)):
            place = outer + dimension - 1
            source = source.narrow(dimension, starts[place], lengths[place])
        return source


def pieces(shape: Sequence[int], starts: Sequence[int], lengths: Sequence[int], elements_max: int) -> Iterator[Piece]:
    """Split the box of these starts and lengths.

    Args:
        shape: the shape of the stored tensor, in row-major order.
        starts: the first index of the box in each dimension.
        lengths: the number of indices in each dimension. No box is empty.
        elements_max: the maximum elements of a range. One element is always allowed.
    """
    if not shape:
        yield Piece((), 0, 1, 0, ())
        return
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]

    def split(index: tuple[int, ...], start: int) -> Iterator[Piece]:
        dimension = len(index)
        stride = strides[dimension]
        if stride > elements_max and dimension + 1 < len(shape):
            for at in range(lengths[dimension]):
                yield from split((*index, at), start + (starts[dimension] + at) * stride)
            return
        step = max(elements_max // stride, 1)
        for first in range(0, lengths[dimension], step):
            count = min(step, lengths[dimension] - first)
            begin = start + (starts[dimension] + first) * stride
            yield Piece(index, first, count, begin, (count, *shape[dimension + 1 :]))

    yield from split((), 0)
