"""What the weights that are in another form on disk become when they arrive. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from deepnvme._deepnvme import _Stored
    from deepnvme._stream.pieces import Origin

    # A tensor in another form, the first of its bytes and how many; or a source, the same of it, and the type there.
    Stretch: TypeAlias = tuple[_Stored, int, int] | tuple[int, int, int, str]
    # What of the files, where it goes, and its type there.
    Conversion: TypeAlias = tuple[Stretch, int, str]

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
