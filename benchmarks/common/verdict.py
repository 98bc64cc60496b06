"""The outcome of a target: met, missed or not measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Verdict:
    """One target: the goal, the measured value, and whether it is met. None if not measured, and why."""

    text: str
    goal: str
    measured: float | None
    met: bool | None
    why: str = ""

    def __str__(self) -> str:
        if self.measured is None:
            why = f": {self.why}" if self.why else ""
            return f"not measured  {self.text} (goal: {self.goal}){why}"
        return f"{'met' if self.met else 'MISSED':12}  {self.text}: {self.measured:.3f} (goal: {self.goal})"


def print_recorded(verdicts: Iterable[dict[str, Any]]) -> None:
    """Print verdicts in the form of records: each with its row."""
    for one in verdicts:
        print(Verdict(f"{one['row']}: {one['text']}", str(one["goal"]), one["measured"], one["met"]))
