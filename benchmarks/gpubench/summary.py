"""Medians, spread and ratios within the rounds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.measure import Sample
    from gpubench.rows import RowResult


@dataclass(frozen=True)
class Line:
    """One tool of a row. A ratio is the median of the ratios within the rounds."""

    name: str
    group: str
    gb_per_s: float
    min_gb_per_s: float
    max_gb_per_s: float
    cpu_s_per_gb: float
    of_reference: float | None
    #: How many times as fast the row's own tool is.
    ours_ratio: float | None
    #: Medians of the row's own metrics.
    extra: dict[str, float]


def lines(row: RowResult) -> list[Line]:
    """Summarise a row, the fastest tool first."""
    reference, ours = row.samples.get(row.reference), row.samples.get(row.ours)
    found = [
        Line(
            name,
            row.groups[name],
            median(one.gb_per_s for one in samples),
            min(one.gb_per_s for one in samples),
            max(one.gb_per_s for one in samples),
            median(one.cpu_s_per_gb for one in samples),
            ratio(samples, reference),
            ratio(ours, samples),
            {key: median(one.extra.get(key, 0.0) for one in samples) for key in samples[0].extra},
        )
        for name, samples in row.samples.items()
    ]
    return sorted(found, key=lambda line: -line.gb_per_s)


def ratio(one: list[Sample] | None, other: list[Sample] | None) -> float | None:
    """Return how many times as fast the first is as the second."""
    if not one or not other:
        return None
    return median(theirs.wall_s / mine.wall_s for mine, theirs in zip(one, other, strict=False))
