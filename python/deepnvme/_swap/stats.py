"""Counters of a swapper."""

from __future__ import annotations

from dataclasses import dataclass

from deepnvme._utils.public import public


@public
@dataclass(frozen=True)
class SwapStats:
    """What a :class:`Swapper` has done since it was made, and how full it is.

    Example:
        >>> with deepnvme.Swapper(".", memory="1MB") as swapper:
        ...     swapper.put("weight", torch.ones(3))
        ...     swapper.stats().items
        1
    """

    hits: int
    """Borrows and puts that found their memory at once."""
    waits: int
    """Borrows and puts that waited."""
    stalled_s: float
    """Total waiting time in seconds."""
    bytes_read: int
    """Bytes read from disk."""
    bytes_written: int
    """Bytes written to disk."""
    reads: int
    """Tensors read."""
    write_backs: int
    """Tensors written back."""
    failures: int
    """Failed reads and writes."""
    evictions: int
    """Tensors evicted from memory."""
    items: int
    """Number of keys."""
    resident_bytes: int
    """Bytes of memory in use now."""
    resident_bytes_peak: int
    """Peak of the bytes in use."""
    memory_bytes: int
    """The memory limit in bytes."""
    stored_bytes: int
    """Bytes of the swap files that belong to tensors."""
    file_bytes: int
    """Bytes of the swap files."""

    @property
    def hit_rate(self) -> float:
        """Fraction of borrows and puts that did not wait; 1 before the first."""
        calls = self.hits + self.waits
        return self.hits / calls if calls else 1.0
