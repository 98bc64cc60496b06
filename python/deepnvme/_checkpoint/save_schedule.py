"""Which calls of ``Checkpointer.save`` save."""

from __future__ import annotations

import datetime as dt

from deepnvme._utils.arguments import whole

_OR_A_TIME = "a time such as datetime.timedelta(minutes=10)"


class SaveSchedule:
    """Decides which calls save: every Nth step, or a minimum time apart; by default all of them."""

    def __init__(self, every: int | dt.timedelta | None) -> None:
        is_time = every is None or isinstance(every, dt.timedelta)
        self._every = every if is_time else whole(every, "every", 1, otherwise=_OR_A_TIME)
        self._last: float | None = None

    @property
    def is_by_time(self) -> bool:
        """Whether the clock decides. The clocks of several processes differ."""
        return isinstance(self._every, dt.timedelta)

    def is_due(self, step: int, now: float) -> bool:
        """Whether to save a state of this step, at this time in seconds."""
        if self._every is None:
            return True
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._last is None or now - self._last >= self._every.total_seconds()

    def note(self, now: float) -> None:
        """Count the time from here. Failed saves do not count, so the next one stays due."""
        self._last = now
