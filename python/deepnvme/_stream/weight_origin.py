"""Describe where the bytes of a weight are: ranges of files, in element order, and how they are decoded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepnvme._deepnvme import Engine, StripeSet, _StoredTensor

    # A stored tensor, first byte, byte count; or source, offset, byte count, and the dtype in the file.
    StoredRange: TypeAlias = tuple[_StoredTensor, int, int] | tuple[int, int, int, str]
    # The stored range, its target offset, and the target dtype.
    Conversion: TypeAlias = tuple[StoredRange, int, str]

# CPU kernels choose their summation order by the position in a cache line. With MKL, one row times a float32 matrix
# gives other last bits if the weights do not start at a multiple of 16 bytes.
CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class ByteRange:
    """A range of a file, or of the decoded bytes of an encoded tensor."""

    source: int
    # Offset in the file, or in the decoded bytes of an encoded tensor.
    offset: int
    nbytes: int
    encoded: _StoredTensor | None = None


@dataclass(frozen=True)
class Origin:
    """The bytes of a tensor on disk, and their meaning."""

    ranges: tuple[ByteRange, ...]
    # Element type in the files, after decoding.
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Element type in memory; ``None`` means the same as on disk.
    cast_to: torch.dtype | None = None
    # Offset within a cache line in the model that results are compared with, if known.
    reference_line_offset: int | None = None

    @property
    def line_offset(self) -> int:
        """The offset within a cache line that gives bit-identical results to the model in memory.

        Libraries that map files leave single ranges where they are in the file. Tensors that they concatenate, cast or
        bring to a GPU have memory of their own.
        """
        if self.reference_line_offset is not None:
            return self.reference_line_offset
        is_mapped = self.is_raw and len(self.ranges) == 1 and self.ranges[0].offset % self.dtype.itemsize == 0
        return self.ranges[0].offset % CACHE_LINE_BYTES if is_mapped else 0

    def for_device(self, device: torch.device) -> Origin:
        """Return the origin for weights on a device.

        Weights that are brought to a GPU have memory of their own there. For addresses that are not multiples of 16,
        GPU libraries select slower kernels, which round otherwise.
        """
        return self if device.type == "cpu" else replace(self, reference_line_offset=0)

    @property
    def is_page_congruent(self) -> bool:
        """Whether the tensor can have the same offset within a memory page as in its file."""
        is_one = self.is_raw and len(self.ranges) == 1
        return is_one and self.ranges[0].offset % CACHE_LINE_BYTES == self.line_offset

    @property
    def nbytes(self) -> int:
        """Decoded bytes, before any cast."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def memory_dtype(self) -> torch.dtype:
        """Element type in memory."""
        return self.cast_to or self.dtype

    @property
    def memory_nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.memory_dtype.itemsize

    @property
    def is_raw(self) -> bool:
        """Whether the bytes in memory equal the bytes in the files."""
        return self.memory_dtype == self.dtype and all(byte_range.encoded is None for byte_range in self.ranges)

    def cast(self, dtype: torch.dtype) -> Origin:
        """Return the same elements with another type in memory."""
        return replace(self, cast_to=None if dtype == self.dtype else dtype)

    def reshaped(self, shape: Sequence[int]) -> Origin:
        """Return the same elements in the same order with another shape."""
        return replace(self, shape=tuple(shape))

    def slice_bytes(self, start: int, nbytes: int) -> tuple[ByteRange, ...]:
        """Return the ranges that cover ``nbytes`` bytes from ``start`` on."""
        taken = []
        for byte_range in self.ranges:
            begin, end = max(start, 0), min(start + nbytes, byte_range.nbytes)
            if begin < end:
                taken.append(replace(byte_range, offset=byte_range.offset + begin, nbytes=end - begin))
            start -= byte_range.nbytes
        return tuple(taken)


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model's weights."""

    # The origin of each weight, by name.
    origin_of: Mapping[str, Origin]
    sources: Sequence[str | StripeSet]
    # The engine that reads them; ``None`` means the default engine.
    engine: Engine | None


def merge_adjacent(ranges: Sequence[ByteRange]) -> tuple[ByteRange, ...]:
    """Merge ranges that are adjacent in a file."""
    whole: list[ByteRange] = []
    for byte_range in ranges:
        last = whole[-1] if whole else None
        is_next = last is not None and (last.source, last.encoded) == (byte_range.source, byte_range.encoded)
        if last is not None and is_next and last.offset + last.nbytes == byte_range.offset:
            whole[-1] = replace(last, nbytes=last.nbytes + byte_range.nbytes)
        elif byte_range.nbytes:
            whole.append(byte_range)
    return tuple(whole)


def concatenate(origins: Sequence[Origin], dim: int) -> Origin:
    """Describe the result of ``torch.cat``: new memory, even if the ranges are adjacent in a file."""
    first = origins[0]
    outer = math.prod(first.shape[:dim])
    ranges: list[ByteRange] = []
    for index in range(outer):
        for origin in origins:
            block = origin.nbytes // outer
            ranges += origin.slice_bytes(index * block, block)
    length = sum(origin.shape[dim] for origin in origins)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return Origin(merge_adjacent(ranges), first.dtype, shape, reference_line_offset=0)


def narrow(origin: Origin, dim: int, start: int, length: int) -> Origin:
    """Describe the result of ``Tensor.narrow``: a view into the memory of the whole."""
    outer, inner = math.prod(origin.shape[:dim]), math.prod(origin.shape[dim + 1 :]) * origin.dtype.itemsize
    block = origin.shape[dim] * inner
    reference_line_offset = None
    if origin.reference_line_offset is not None and outer == 1:
        reference_line_offset = (origin.reference_line_offset + start * inner) % CACHE_LINE_BYTES
    ranges: list[ByteRange] = []
    for index in range(outer):
        ranges += origin.slice_bytes(index * block + start * inner, length * inner)
    shape = (*origin.shape[:dim], length, *origin.shape[dim + 1 :])
    return Origin(merge_adjacent(ranges), origin.dtype, shape, reference_line_offset=reference_line_offset)


# Types that are cast to each other on load.
FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def can_cast(from_dtype: torch.dtype, to_dtype: torch.dtype) -> bool:
    """Whether weights of one type can be cast to the other on load."""
    return from_dtype == to_dtype or (from_dtype in FLOATS and to_dtype in FLOATS)


def stored_ranges(origin: Origin) -> list[StoredRange]:
    """List the stored ranges of a weight in element order."""
    made: list[StoredRange] = []
    for byte_range in origin.ranges:
        if byte_range.encoded is None:
            made.append((byte_range.source, byte_range.offset, byte_range.nbytes, FLOATS[origin.dtype]))
        else:
            made.append((byte_range.encoded, byte_range.offset, byte_range.nbytes))
    return made


def conversions(origin: Origin, at: int) -> list[Conversion]:
    """List the conversions that decode a weight to the offset ``at`` in memory."""
    made = []
    for byte_range, stored_range in zip(origin.ranges, stored_ranges(origin), strict=True):
        made.append((stored_range, at, FLOATS[origin.memory_dtype]))
        at += byte_range.nbytes // origin.dtype.itemsize * origin.memory_dtype.itemsize
    return made
