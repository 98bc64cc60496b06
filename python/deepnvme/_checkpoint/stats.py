"""What saving has cost."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Adds up. Threads tell it at the same time, and so does a signal handler that saves during a save.

    It takes no lock, which a handler would wait for that interrupted its holder: each number is put into a list.
    """

    def __init__(self) -> None:
        self._stalls: list[float] = []
        self._saves: list[tuple[int, float]] = []

    @property
    def now(self) -> CheckpointerStats:
        """What there is so far."""
        saves = list(self._saves)
        nbytes, seconds = sum(nbytes for nbytes, _ in saves), sum(seconds for _, seconds in saves)
        return CheckpointerStats(len(saves), nbytes, sum(list(self._stalls)), float(seconds))

    def add_stall(self, seconds: float) -> None:
        """Training has waited."""
        self._stalls.append(seconds)

    def add_save(self, nbytes: int, seconds: float) -> None:
        """One more checkpoint counts."""
        self._saves.append((nbytes, seconds))
