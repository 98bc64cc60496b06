"""Where the bytes of a weight lie: stretches of files, in the order of its elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepnvme._deepnvme import _Stored

    # A tensor in another form, the first of its bytes and how many; or a source, the same of it, and the type there.
    Stretch: TypeAlias = tuple[_Stored, int, int] | tuple[int, int, int, str]
    # What of the files, where it goes, and its type there.
    Conversion: TypeAlias = tuple[Stretch, int, str]

# What the kernels of a processor look at when they choose how to add up: the same weights elsewhere in a cache line may
# give other last bits (MKL, one row times a float32 matrix, away from multiples of 16 bytes).
LINE_BYTES = 64


@dataclass(frozen=True)
class Piece:
    """A stretch of a file, or of the bytes that a tensor in another form is decoded to."""

    source: int
    # Where in the file; of a tensor in another form, where in its bytes.
    offset: int
    nbytes: int
    stored: _Stored | None = None


@dataclass(frozen=True)
class Origin:
    """The bytes of a tensor, and what they mean."""

    pieces: tuple[Piece, ...]
    # Of its elements as the files have them, decoded.
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Into which they are cast when they come; ``None``: as they are.
    held_as: torch.dtype | None = None
    # How far into a cache line it is in the model that results are compared with, where that is known.
    residue: int | None = None

    @property
    def begins_at(self) -> int:
        """How far into a cache line it has to lie, so that results are those of the model in memory, to the bit.

        A library that maps files has single stretches as they lie there; what it puts together or casts is in memory of
        its own.
        """
        if self.residue is not None:
            return self.residue
        is_mapped = self.is_plain and len(self.pieces) == 1 and self.pieces[0].offset % self.dtype.itemsize == 0
        return self.pieces[0].offset % LINE_BYTES if is_mapped else 0

    @property
    def is_as_on_disk(self) -> bool:
        """Whether it can lie in a page of memory as it does in a page of its file."""
        is_one = self.is_plain and len(self.pieces) == 1
        return is_one and self.pieces[0].offset % LINE_BYTES == self.begins_at

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def memory_dtype(self) -> torch.dtype:
        """The type in memory."""
        return self.held_as or self.dtype

    @property
    def memory_nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.memory_dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are in memory what they are in the files."""
        return self.memory_dtype == self.dtype and all(piece.stored is None for piece in self.pieces)

    def held(self, dtype: torch.dtype) -> Origin:
        """Have the same elements as others in memory."""
        return replace(self, held_as=None if dtype == self.dtype else dtype)

    def reshaped(self, shape: Sequence[int]) -> Origin:
        """Have the same elements in the same order in other dimensions."""
        return replace(self, shape=tuple(shape))

    def part(self, start: int, nbytes: int) -> tuple[Piece, ...]:
        """Take the pieces that are ``nbytes`` from ``start`` on."""
        taken = []
        for piece in self.pieces:
            begin, end = max(start, 0), min(start + nbytes, piece.nbytes)
            if begin < end:
                taken.append(replace(piece, offset=piece.offset + begin, nbytes=end - begin))
            start -= piece.nbytes
        return tuple(taken)


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Make one piece of those that lie one behind the other."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        is_next = last is not None and (last.source, last.stored) == (piece.source, piece.stored)
        if last is not None and is_next and last.offset + last.nbytes == piece.offset:
            whole[-1] = replace(last, nbytes=last.nbytes + piece.nbytes)
        elif piece.nbytes:
            whole.append(piece)
    return tuple(whole)


def concatenated(origins: Sequence[Origin], dim: int) -> Origin:
    """Do what ``torch.cat`` does: the result has memory of its own, also where its pieces are neighbours in a file."""
    first = origins[0]
    outer = math.prod(first.shape[:dim])
    pieces: list[Piece] = []
    for index in range(outer):
        for origin in origins:
            block = origin.nbytes // outer
            pieces += origin.part(index * block, block)
    length = sum(origin.shape[dim] for origin in origins)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return Origin(joined(pieces), first.dtype, shape, residue=0)


def narrowed(origin: Origin, dim: int, start: int, length: int) -> Origin:
    """Do what ``Tensor.narrow`` does: the result is within the memory of the whole."""
    outer, inner = math.prod(origin.shape[:dim]), math.prod(origin.shape[dim + 1 :]) * origin.dtype.itemsize
    block = origin.shape[dim] * inner
    residue = None
    if origin.residue is not None and outer == 1:
        residue = (origin.residue + start * inner) % LINE_BYTES
    pieces: list[Piece] = []
    for index in range(outer):
        pieces += origin.part(index * block + start * inner, length * inner)
    shape = (*origin.shape[:dim], length, *origin.shape[dim + 1 :])
    return Origin(joined(pieces), origin.dtype, shape, residue=residue)


# Those that are cast on arrival.
FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def can_cast(origin: torch.dtype, target: torch.dtype) -> bool:
    """Whether weights of that type become the other one when they come."""
    return origin == target or (origin in FLOATS and target in FLOATS)


def stretches(origin: Origin) -> list[Stretch]:
    """Say what of the files a weight is made of, in the order of its elements."""
    made: list[Stretch] = []
    for piece in origin.pieces:
        if piece.stored is None:
            made.append((piece.source, piece.offset, piece.nbytes, FLOATS[origin.dtype]))
        else:
            made.append((piece.stored, piece.offset, piece.nbytes))
    return made


def conversions(origin: Origin, at: int) -> list[Conversion]:
    """Say what brings a weight to ``at``: stretches, the place of each, and the type there."""
    made = []
    for piece, stretch in zip(origin.pieces, stretches(origin), strict=True):
        made.append((stretch, at, FLOATS[origin.memory_dtype]))
        at += piece.nbytes // origin.dtype.itemsize * origin.memory_dtype.itemsize
    return made
