"""Finds the best of several settings: tries all once, then the fastest few again in turn."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

S = TypeVar("S")


@dataclass(frozen=True)
class Choice(Generic[S]):
    """The choice of a sweep, and all its trials (seconds by setting, in the order of the candidates)."""

    best: S
    trials: list[tuple[S, list[float]]]

    def to_json(self) -> dict[str, object]:
        """Return the sweep as JSON-ready values."""
        return {
            "best": str(self.best),
            "trials": {str(setting): [round(s, 6) for s in seconds] for setting, seconds in self.trials},
        }


def best_setting(
    candidates: Sequence[S],
    trial: Callable[[S], float],
    *,
    finalists: int,
    final_trials: int,
) -> Choice[S]:
    """Try every candidate once, the `finalists` fastest `final_trials` times more, and take the best median.

    `trial` runs one setting and returns its seconds. One trial is noise on a shared disk, so the last word
    belongs to a median.
    """
    trials = [(candidate, [trial(candidate)]) for candidate in candidates]
    fastest = sorted(trials, key=lambda entry: entry[1][0])[:finalists]
    if len(fastest) > 1:
        for _ in range(final_trials):
            for candidate, seconds in fastest:
                seconds.append(trial(candidate))
    best = min(fastest, key=lambda entry: median(entry[1]))
    return Choice(best[0], trials)
