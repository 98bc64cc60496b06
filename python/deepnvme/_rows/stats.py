"""Counters of a row store."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme._utils.public import public


@public
@dataclass(frozen=True)
class RowStats:
    """Counters of a :class:`RowStore` since it was opened.

    Attributes:
        rows: rows that callers asked for, repeated ones included.
        hits: of these, rows found in memory.
        rows_read: rows that were read from disk; a row that is read twice counts twice.
        reads: read operations.
        bytes_read: bytes of these operations: whole pages of 4 KiB.
        rows_joined: rows that were read in the same operation as another row.
        rows_shared: rows for which a gather waited, because another gather or a prefetch was reading them.
        rows_prefetched: rows that a prefetch read.
        rows_not_prefetched: rows that prefetches skipped: their deadline had passed, or those in flight were more
            than half of the cache holds.
        memory_bytes: the most bytes that the store uses.
        cached_rows_max: rows that fit into the cache.

    Example:
        >>> deepnvme.write(torch.ones(100, 8), "rows.bin")
        3200
        >>> with deepnvme.RowStore("rows.bin", shape=(100, 8), dtype=torch.float32, memory="1MB") as table:
        ...     rows = table.gather([3, 3, 5])
        ...     stats = table.stats()
        >>> stats.rows, stats.rows_read, stats.reads
        (3, 2, 1)
    """

    rows: int
    hits: int
    rows_read: int
    reads: int
    bytes_read: int
    rows_joined: int
    rows_shared: int
    rows_prefetched: int
    rows_not_prefetched: int
    memory_bytes: int
    cached_rows_max: int
