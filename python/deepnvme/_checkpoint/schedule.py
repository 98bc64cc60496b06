"""Whose turn it is: the calls of ``Checkpointer.save`` that save."""

from __future__ import annotations

import datetime as dt

from deepnvme._utils.arguments import whole


class Schedule:
    """Every so many steps, or so long after the last save; each call where nothing was said."""

    def __init__(self, every: int | dt.timedelta | None) -> None:
        is_time = every is None or isinstance(every, dt.timedelta)
        self._every = every if is_time else whole(every, "every (a number of steps, or a timedelta)", 1)
        self._last: float | None = None

    @property
    def is_by_time(self) -> bool:
        """Whether a clock says it: those of several processes differ."""
        return isinstance(self._every, dt.timedelta)

    def is_due(self, step: int, now: float) -> bool:
        """Whether a state of that step, at that time in seconds, is to be saved."""
        if self._every is None:
            return True
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._last is None or now - self._last >= self._every.total_seconds()

    def note(self, now: float) -> None:
        """Count the time from here. A save that failed is not noted: the next one is due as it was."""
        self._last = now
