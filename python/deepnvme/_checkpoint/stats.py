"""What saving has cost."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CheckpointerStats:
    """What saving has cost so far. Of several processes all count the same files, and each its own time."""

    saves: int
    """Checkpoints that are in the manifest."""
    nbytes: int
    """Bytes of those."""
    stall_s: float
    """How long ``save``, and the optimizers of ``overlap``, have kept training waiting, in seconds."""
    write_s: float
    """How long the files took, from the call of ``save`` to the name, in seconds."""


class Tally:
    """Adds up. Who trains and who writes in the background tell it at the same time."""

    def __init__(self) -> None:
        self.now = CheckpointerStats(0, 0, 0.0, 0.0)
        self._lock = threading.Lock()

    def add_stall(self, seconds: float) -> None:
        """Training has waited."""
        with self._lock:
            self.now = replace(self.now, stall_s=self.now.stall_s + seconds)

    def add_save(self, nbytes: int, seconds: float) -> None:
        """One more checkpoint counts."""
        with self._lock:
            now = self.now
            self.now = replace(now, saves=now.saves + 1, nbytes=now.nbytes + nbytes, write_s=now.write_s + seconds)
