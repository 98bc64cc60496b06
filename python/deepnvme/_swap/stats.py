"""Counters of a swapper."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme._utils.public import public


@public
@dataclass(frozen=True)
class SwapStats:
    """What a :class:`Swapper` has done since it was made, and how full it is.

    Attributes:
        hits: borrows whose tensor was in memory, and puts that replaced such a tensor with one of the same size.
        waits: borrows and puts that needed memory or a read first.
        stalled_s: total waiting time in seconds.
        bytes_read: bytes read from disk.
        bytes_written: bytes written to disk.
        reads: tensors read.
        write_backs: tensors written back.
        failures: failed reads and writes.
        evictions: tensors evicted from memory.
        items: number of keys.
        resident_bytes: bytes of memory in use now.
        resident_bytes_peak: peak of the bytes in use.
        memory_bytes: the memory limit in bytes.
        stored_bytes: bytes of the swap files that belong to tensors.
        file_bytes: bytes of the swap files.

    Example:
        >>> with deepnvme.Swapper(".", memory="1MB") as swapper:
        ...     swapper.put("weight", torch.ones(3))
        ...     swapper.stats().items
        1
    """

    hits: int
    waits: int
    stalled_s: float
    bytes_read: int
    bytes_written: int
    reads: int
    write_backs: int
    failures: int
    evictions: int
    items: int
    resident_bytes: int
    resident_bytes_peak: int
    memory_bytes: int
    stored_bytes: int
    file_bytes: int

    @property
    def hit_rate(self) -> float:
        """Hits as a fraction of all borrows and puts; 1 before the first."""
        calls = self.hits + self.waits
        return self.hits / calls if calls else 1.0
