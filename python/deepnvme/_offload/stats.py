"""What swapping has cost so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapStats:
    """What a :class:`Swapper` has done since it was made, and how full it is."""

    hits: int
    """Lends and puts that had their memory at once."""
    waits: int
    """Those that had to wait."""
    stalled_s: float
    """How long those waited, in seconds."""
    bytes_read: int
    """Bytes read from disk."""
    bytes_written: int
    """Bytes written to disk."""
    reads: int
    """Tensors that were read."""
    write_backs: int
    """Tensors that were written back."""
    failures: int
    """Reads and writes that failed."""
    evictions: int
    """Tensors that made room for others."""
    items: int
    """Keys."""
    resident_bytes: int
    """Bytes of memory in use now."""
    resident_bytes_peak: int
    """The most that were in use at any time."""
    memory_bytes: int
    """The bound."""
    stored_bytes: int
    """Bytes of the swap files that belong to tensors."""
    file_bytes: int
    """Bytes of the swap files."""

    @property
    def hit_rate(self) -> float:
        """The share of lends and puts that did not wait; 1 before the first."""
        calls = self.hits + self.waits
        return self.hits / calls if calls else 1.0
