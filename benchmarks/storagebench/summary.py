"""Medians and ratios of one row.

A ratio is the median of the ratios within the rounds: a disturbance of a shared disk affects both tools of a round.
The baseline "fio" (or "DeepSpeed") is the tool of that group with the best median of the row. Choosing the fastest
in each round would select noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.measure import Sample
    from storagebench.rounds import RowResult


@dataclass(frozen=True)
class Line:
    """One tool of one row; ratios above 1 mean faster than the baseline."""

    name: str
    group: str
    figure: float  # The name is a key of the stored records, which `make plot` draws again.
    wall_s: float
    wall_s_min: float
    wall_s_max: float
    gb_per_s: float
    cpu_s_per_gb: float
    extra: dict[str, float]
    ratio_to_fio: float | None
    ratio_to_deepspeed: float | None


@dataclass(frozen=True)
class RowSummary:
    """One row, and which tools the ratios are taken against."""

    key: str
    title: str
    unit: str
    rounds: int
    bytes_moved: int
    lines: list[Line]
    best_fio: str | None
    best_deepspeed: str | None

    def line(self, name: str) -> Line | None:
        """Return the line of a tool, or None."""
        return next((line for line in self.lines if line.name == name), None)


def summarise(result: RowResult) -> RowSummary:
    """Return medians and ratios of a row."""
    cost = result.row.cost
    best = {group: _best(result, group) for group in ("fio", "DeepSpeed")}
    lines = []
    for tool in result.complete():
        samples = result.samples[tool.name]
        walls = [sample.wall_s for sample in samples]
        lines.append(
            Line(
                name=tool.name,
                group=tool.group,
                figure=median(result.row.metric(sample) for sample in samples),
                wall_s=median(walls),
                wall_s_min=min(walls),
                wall_s_max=max(walls),
                gb_per_s=median(sample.gb_per_s for sample in samples),
                cpu_s_per_gb=median(sample.cpu_s_per_gb for sample in samples),
                extra={key: median(sample.extra[key] for sample in samples) for key in samples[0].extra},
                ratio_to_fio=_ratio(result, samples, best["fio"], cost),
                ratio_to_deepspeed=_ratio(result, samples, best["DeepSpeed"], cost),
            ),
        )
    first = next(iter(result.samples.values()), [])
    return RowSummary(
        key=result.row.key,
        title=result.row.title,
        unit=result.row.unit,
        rounds=len(first),
        bytes_moved=first[0].bytes_moved if first else 0,
        lines=lines,
        best_fio=best["fio"],
        best_deepspeed=best["DeepSpeed"],
    )


def ratio_between(result: RowResult, name: str, baseline: str) -> float | None:
    """Return the median of the per-round ratios of two tools, or None if one has no samples."""
    if name not in result.samples:
        return None
    return _ratio(result, result.samples[name], baseline, result.row.cost)


def _best(result: RowResult, group: str) -> str | None:
    medians = {
        one.name: median(result.row.cost(sample) for sample in result.samples[one.name])
        for one in result.complete()
        if one.group == group
    }
    return min(medians, key=lambda name: medians[name], default=None)


def _ratio(
    result: RowResult,
    samples: Sequence[Sample],
    baseline: str | None,
    cost: Callable[[Sample], float],
) -> float | None:
    if baseline is None or baseline not in result.samples:
        return None
    return median(cost(theirs) / cost(ours) for ours, theirs in zip(samples, result.samples[baseline], strict=True))
