"""Where in a slot the weights of a unit lie. Pure.

A stretch of a file that lies in memory as it lies in the file, to the page, is read without a copy. So neighbours in
the file stay neighbours in the slot, and each stretch begins as far into a page as in its file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepnvme._stream.arrival import conversions
from deepnvme._stream.budget import PAGE_BYTES
from deepnvme._stream.pieces import LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deepnvme._stream.arrival import Conversion
    from deepnvme._stream.pieces import Origin

# What nobody wants is read along if it is no longer than that.
_GAP_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class UnitLayout:
    """A unit in a slot."""

    # Source, offset in it, bytes, place in the slot: what is read.
    reads: tuple[tuple[int, int, int, int], ...]
    # What becomes other bytes when it arrives.
    conversions: tuple[Conversion, ...]
    # Where each weight begins in the slot, in the order in which they were given.
    places: tuple[int, ...]
    nbytes: int


def lay_out(origins: Sequence[Origin], file_bytes: Mapping[int, int]) -> UnitLayout:
    """Lay out the weights of a unit.

    Args:
        origins: where each weight is on disk. One that is given twice lies there once.
        file_bytes: how long each source is.
    """
    places: dict[Origin, int] = {}
    mirrored = sorted({origin for origin in origins if origin.is_as_on_disk}, key=_start)
    reads: list[tuple[int, int, int, int]] = []
    at = 0
    stretch: list[Origin] = []

    def close() -> None:
        nonlocal at
        if not stretch:
            return
        source = stretch[0].pieces[0].source
        begin = stretch[0].pieces[0].offset // PAGE_BYTES * PAGE_BYTES
        last = stretch[-1].pieces[0]
        end = min(-(-(last.offset + last.nbytes) // PAGE_BYTES) * PAGE_BYTES, file_bytes[source])
        for origin in stretch:
            places[origin] = at + origin.pieces[0].offset - begin
        reads.append((source, begin, end - begin, at))
        at += -(-(end - begin) // PAGE_BYTES) * PAGE_BYTES
        stretch.clear()

    for origin in mirrored:
        piece = origin.pieces[0]
        if stretch:
            before = stretch[-1].pieces[0]
            gap = piece.offset - before.offset - before.nbytes
            if before.source != piece.source or not 0 <= gap <= _GAP_BYTES_MAX:
                close()
        stretch.append(origin)
    close()
    # The others are put together out of pieces, or lie where their elements cannot be used, or not as in memory.
    for origin in origins:
        if origin in places or not origin.is_plain:
            continue
        at += origin.begins_at
        places[origin] = at
        for piece in origin.pieces:
            reads.append((piece.source, piece.offset, piece.nbytes, at))
            at += piece.nbytes
        at = -(-at // PAGE_BYTES) * PAGE_BYTES
    converted, at = place_converted(origins, places, at)
    return UnitLayout(tuple(reads), tuple(converted), tuple(places[origin] for origin in origins), at)


def place_converted(origins: Iterable[Origin], places: dict[Origin, int], at: int) -> tuple[list[Conversion], int]:
    """Place what has none yet: weights that become other bytes when they arrive.

    Returns:
        What brings them there, and where the last ends.
    """
    converted: list[Conversion] = []
    for origin in origins:
        if origin not in places:
            places[origin] = at + origin.begins_at
            converted += conversions(origin, places[origin])
            at += -(-(origin.begins_at + origin.memory_nbytes) // LINE_BYTES) * LINE_BYTES
    return converted, at


def _start(origin: Origin) -> tuple[int, int]:
    return origin.pieces[0].source, origin.pieces[0].offset
