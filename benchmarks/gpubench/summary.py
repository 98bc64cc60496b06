"""Medians, spread, ratios within the rounds, and targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from gpubench import loaders, ours
from storagebench.verdict import Verdict

if TYPE_CHECKING:
    from gpubench.rows import Row
    from storagebench.measure import Sample

_MARK_RATIO = 0.95


@dataclass(frozen=True)
class Line:
    """One tool of a row. A ratio is the median of the ratios within the rounds."""

    name: str
    group: str
    gb_per_s: float
    min_gb_per_s: float
    max_gb_per_s: float
    cpu_s_per_gb: float
    of_mark: float | None
    ours_beside: float | None


def lines(row: Row) -> list[Line]:
    """Sum a row up, the fastest first."""
    mark, first = row.samples.get(ours.MARK), row.samples.get(_first(row))
    found = [
        Line(
            name,
            row.groups[name],
            median(one.gb_per_s for one in samples),
            min(one.gb_per_s for one in samples),
            max(one.gb_per_s for one in samples),
            median(one.cpu_s_per_gb for one in samples),
            ratio(samples, mark),
            ratio(first, samples),
        )
        for name, samples in row.samples.items()
    ]
    return sorted(found, key=lambda line: -line.gb_per_s)


def ratio(one: list[Sample] | None, other: list[Sample] | None) -> float | None:
    """How many times as fast the first is as the second."""
    if not one or not other:
        return None
    return median(theirs.wall_s / mine.wall_s for mine, theirs in zip(one, other, strict=False))


def _first(row: Row) -> str:
    return loaders.OURS if row.key == "load" else ours.BOUNCE


def judge(rows: list[Row]) -> list[Verdict]:
    """Return the verdict on every target."""
    verdicts: list[Verdict] = []
    for row in rows:
        first = _first(row)
        if row.key != "load":
            verdicts.append(_beside(row, first, ours.MARK, _MARK_RATIO))
            verdicts.append(_beside(row, ours.GDS, "kvikio", 1.0))
        baselines = [name for name, group in row.groups.items() if group == "baseline"]
        verdicts.extend(_beside(row, first, name, 1.0) for name in baselines)
        verdicts.append(_cpu(row, first))
    return verdicts


def _beside(row: Row, one: str, other: str, wanted: float) -> Verdict:
    measured = ratio(row.samples.get(one), row.samples.get(other))
    why = "; ".join(f"{name}: {row.left_out[name]}" for name in (one, other) if name in row.left_out)
    met = None if measured is None else measured >= wanted
    return Verdict(f"{row.key}: {one} beside {other}", f">= {wanted}", measured, met, why)


def _cpu(row: Row, first: str) -> Verdict:
    by_name = {line.name: line for line in lines(row)}
    others = [line for line in by_name.values() if line.group == "baseline"]
    text = f"{row.key}: CPU s/GB of {first}"
    if first not in by_name or not others:
        return Verdict(text, "less than any other's", None, None, row.left_out.get(first, "there is no other"))
    least = min(others, key=lambda line: line.cpu_s_per_gb)
    measured = by_name[first].cpu_s_per_gb
    return Verdict(text, f"<= {least.cpu_s_per_gb:.3f} of {least.name}", measured, measured <= least.cpu_s_per_gb)


def row_record(row: Row) -> dict[str, Any]:
    """Return a row as JSON-ready values."""
    return {
        "key": row.key,
        "title": row.title,
        "lines": [asdict(line) for line in lines(row)],
        "samples": {name: [one.record() for one in samples] for name, samples in row.samples.items()},
        "settings": row.settings,
        "left_out": row.left_out,
        "notes": row.notes,
    }


def table(row: Row) -> str:
    """Draw a row for people."""
    heads = f"{'':36} {'GB/s':>6} {'min - max':>15} {'CPU s/GB':>9} {'of mark':>8} {'ours x':>7}"
    text = [f"\n{row.title}", heads]
    for line in lines(row):
        spread = f"{line.min_gb_per_s:.2f} - {line.max_gb_per_s:.2f}"
        ratios = [f"{one:.2f}" if one is not None else "-" for one in (line.of_mark, line.ours_beside)]
        metrics = f"{line.gb_per_s:6.2f} {spread:>15} {line.cpu_s_per_gb:9.3f}"
        text.append(f"{line.name:36} {metrics} {ratios[0]:>8} {ratios[1]:>7}")
    text += [f"left out: {name}: {why}" for name, why in row.left_out.items()]
    text += [f"note: {note}" for note in row.notes]
    return "\n".join(text)
