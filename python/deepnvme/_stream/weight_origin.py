"""Where the bytes of a weight lie: encoded_ranges of files, in the order of its elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepnvme._deepnvme import _Stored

    # A tensor in another form, the first of its bytes and how many; or a source, the same of it, and the type there.
    EncodedRange: TypeAlias = tuple[_Stored, int, int] | tuple[int, int, int, str]
    # What of the files, where it goes, and its type there.
    Conversion: TypeAlias = tuple[EncodedRange, int, str]

# What the kernels of a processor look at when they choose how to add up: the same weights elsewhere in a cache line may
# give other last bits (MKL, one row times a float32 matrix, away from multiples of 16 bytes).
CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class ByteRange:
    """A run of a file, or of the bytes that a tensor in another form is decoded to."""

    source: int
    # Where in the file; of a tensor in another form, where in its bytes.
    offset: int
    nbytes: int
    stored: _Stored | None = None


@dataclass(frozen=True)
class Origin:
    """The bytes of a tensor, and what they mean."""

    ranges: tuple[ByteRange, ...]
    # Of its elements as the files have them, decoded.
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Into which they are cast when they come; ``None``: as they are.
    cast_to: torch.dtype | None = None
    # How far into a cache line it is in the model that results are compared with, where that is known.
    reference_line_offset: int | None = None

    @property
    def line_offset(self) -> int:
        """How far into a cache line it has to lie, so that results are those of the model in memory, to the bit.

        A library that maps files has single encoded_ranges as they lie there; what it puts together or casts is in memory of
        its own.
        """
        if self.reference_line_offset is not None:
            return self.reference_line_offset
        is_mapped = self.is_raw and len(self.ranges) == 1 and self.ranges[0].offset % self.dtype.itemsize == 0
        return self.ranges[0].offset % CACHE_LINE_BYTES if is_mapped else 0

    @property
    def is_page_congruent(self) -> bool:
        """Whether it can lie in a page of memory as it does in a page of its file."""
        is_one = self.is_raw and len(self.ranges) == 1
        return is_one and self.ranges[0].offset % CACHE_LINE_BYTES == self.line_offset

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def memory_dtype(self) -> torch.dtype:
        """The type in memory."""
        return self.cast_to or self.dtype

    @property
    def memory_nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.memory_dtype.itemsize

    @property
    def is_raw(self) -> bool:
        """Whether its bytes are in memory what they are in the files."""
        return self.memory_dtype == self.dtype and all(byte_range.stored is None for byte_range in self.ranges)

    def cast(self, dtype: torch.dtype) -> Origin:
        """Have the same elements as others in memory."""
        return replace(self, cast_to=None if dtype == self.dtype else dtype)

    def reshaped(self, shape: Sequence[int]) -> Origin:
        """Have the same elements in the same order in other dimensions."""
        return replace(self, shape=tuple(shape))

    def slice_bytes(self, start: int, nbytes: int) -> tuple[ByteRange, ...]:
        """Take the ranges that are ``nbytes`` from ``start`` on."""
        taken = []
        for byte_range in self.ranges:
            begin, end = max(start, 0), min(start + nbytes, byte_range.nbytes)
            if begin < end:
                taken.append(replace(byte_range, offset=byte_range.offset + begin, nbytes=end - begin))
            start -= byte_range.nbytes
        return tuple(taken)


def merge_adjacent(ranges: Sequence[ByteRange]) -> tuple[ByteRange, ...]:
    """Make one byte_range of those that lie one behind the other."""
    whole: list[ByteRange] = []
    for byte_range in ranges:
        last = whole[-1] if whole else None
        is_next = last is not None and (last.source, last.stored) == (byte_range.source, byte_range.stored)
        if last is not None and is_next and last.offset + last.nbytes == byte_range.offset:
            whole[-1] = replace(last, nbytes=last.nbytes + byte_range.nbytes)
        elif byte_range.nbytes:
            whole.append(byte_range)
    return tuple(whole)


def concatenate(origins: Sequence[Origin], dim: int) -> Origin:
    """Do what ``torch.cat`` does: the result has memory of its own, also where its ranges are neighbours in a file."""
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
    """Do what ``Tensor.narrow`` does: the result is within the memory of the whole."""
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


# Those that are cast on arrival.
FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def can_cast(origin: torch.dtype, target: torch.dtype) -> bool:
    """Whether weights of that type become the other one when they come."""
    return origin == target or (origin in FLOATS and target in FLOATS)


def encoded_ranges(origin: Origin) -> list[EncodedRange]:
    """Say what of the files a weight is made of, in the order of its elements."""
    made: list[EncodedRange] = []
    for byte_range in origin.ranges:
        if byte_range.stored is None:
            made.append((byte_range.source, byte_range.offset, byte_range.nbytes, FLOATS[origin.dtype]))
        else:
            made.append((byte_range.stored, byte_range.offset, byte_range.nbytes))
    return made


def conversions(origin: Origin, at: int) -> list[Conversion]:
    """Say what brings a weight to ``at``: encoded_ranges, the place of each, and the type there."""
    made = []
    for byte_range, run in zip(origin.ranges, encoded_ranges(origin), strict=True):
        made.append((run, at, FLOATS[origin.memory_dtype]))
        at += byte_range.nbytes // origin.dtype.itemsize * origin.memory_dtype.itemsize
    return made
