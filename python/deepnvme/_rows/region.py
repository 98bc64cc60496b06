"""The bytes of a file in which the rows of a table are, for readers other than ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from deepnvme._rows.named_table import is_striped

if TYPE_CHECKING:
    from deepnvme._rows.named_table import NamedTable

_PAGE_BYTES = 4096


class Region(NamedTuple):
    """Whole pages of a file, the last one perhaps in part."""

    path: str
    offset: int
    nbytes: int
    read_bytes: int
    """Bytes that a direct read of one row takes at least."""
    first_row: int | None
    """Offset of the first row, if all rows are in place and follow each other."""


def find_region(table: NamedTable) -> Region | str:
    """Return the region of a table; or a sentence that says why there is none."""
    if is_striped(table):
        return "the table is on a stripe set"
    packed = table.packed()
    rows = packed.rows if packed is not None else table.located()
    if len(rows.files) > 1:
        return "the table is in several files"
    path = table.files()[0]
    if packed is not None:
        _, offset, number = rows.ranges[0]
        rows_per_block, block_bytes, _ = packed.blocks
        return Region(path, offset, -(-number // rows_per_block) * block_bytes, block_bytes, None)
    start = min(offset for _, offset, _ in rows.ranges)
    end = max(offset + number * rows.row_bytes for _, offset, number in rows.ranges)
    page = start // _PAGE_BYTES * _PAGE_BYTES
    read_bytes = -(-rows.row_bytes // _PAGE_BYTES) * _PAGE_BYTES
    return Region(path, page, end - page, read_bytes, start if len(rows.ranges) == 1 else None)
