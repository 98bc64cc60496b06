"""The result of one stage of the demo: the rates of two tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median_low


@dataclass
class Comparison:
    """Rates of two tools that did the same work in alternating rounds. A higher rate is better."""

    work: str
    unit: str
    tool: str
    """The tool that people use today."""
    note: str = ""
    theirs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    missing: str = ""
    """The reason why the work was not measured."""

    @property
    def middle_round(self) -> tuple[float, float]:
        """Their rate and ours in the round with the median ratio; of two such rounds, in the one that favours them."""
        rounds = list(zip(self.theirs, self.ours, strict=True))
        ratios = [ours / theirs for theirs, ours in rounds]
        return rounds[ratios.index(median_low(ratios))]

    @property
    def ratio(self) -> float:
        """Our rate in units of theirs: the median of the rounds' ratios."""
        theirs, ours = self.middle_round
        return ours / theirs

    def to_dict(self) -> dict[str, object]:
        """Return the fields except the note, and the ratio, ready for JSON."""
        rates = {"theirs": self.theirs, "ours": self.ours, "ratio": self.ratio if self.ours else None}
        return {"work": self.work, "unit": self.unit, "tool": self.tool, "missing": self.missing or None, **rates}


class WrongResultError(Exception):
    """A tool gave another result than the other tool, or than what it had saved."""
