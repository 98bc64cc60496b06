"""The cost of saving with a ``Checkpointer``."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from deepnvme._utils.public import public


@public
@dataclass(frozen=True)
class CheckpointerStats:
    """The cost of saving so far. Every process counts the same files; the times are its own.

    Attributes:
        saves: checkpoints that were added to the manifest.
        nbytes: their size in bytes.
        stall_s: seconds that ``save``, and the optimizers of ``overlap``, blocked training.
        write_s: seconds from each call of ``save`` until its file got its name, summed up.

    Example:
        >>> checkpointer = deepnvme.Checkpointer("checkpoints")
        >>> checkpointer.save(1, {"weight": torch.ones(3)})
        True
        >>> checkpointer.stats().saves
        1
    """

    saves: int
    nbytes: int
    stall_s: float
    write_s: float


class StatsCounter:
    """Adds up the statistics. Threads update them at the same time, and so may a signal handler.

    There is no lock, because a handler would wait forever for the thread that it interrupted. The numbers are appended
    to arrays instead.
    """

    def __init__(self) -> None:
        # Signal handlers and other threads add to them as well, so one call adds a whole entry.
        self._stalls = array("d")
        self._saves = array("d")  # bytes and seconds of each

    @property
    def current(self) -> CheckpointerStats:
        """The statistics so far."""
        saves = self._saves[:]
        nbytes, seconds = int(sum(saves[0::2])), sum(saves[1::2])
        return CheckpointerStats(len(saves) // 2, nbytes, sum(self._stalls[:]), float(seconds))

    def add_stall(self, seconds: float) -> None:
        """Count time that training waited."""
        self._stalls.append(seconds)

    def add_save(self, nbytes: int, seconds: float) -> None:
        """Count one more checkpoint."""
        self._saves.extend((nbytes, seconds))
