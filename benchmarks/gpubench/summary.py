"""Medians, spread, ratios within the rounds, targets, and the outcome of each row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from gpubench import checkpoint, ours
from storagebench.verdict import Verdict

if TYPE_CHECKING:
    from gpubench.rows import Row
    from storagebench.measure import Sample

_TO_HOST_RATIO = 0.95
#: The row that measures transfers to host memory in the same direction.
_HOST_ROW = {"read": "read", "write": "write", "load": "read", "stream": "read", "checkpoint": "write"}


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
    ours_beside: float | None
    #: Medians of the row's own metrics.
    extra: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """Whether a row passed, and its speed next to that of pinned host memory."""

    key: str
    status: Literal["passed", "failed", "left out"]
    why: str
    tool: str
    gb_per_s: float | None
    host_gb_per_s: float | None

    def __str__(self) -> str:
        text = f"{self.status:9} {self.key:10}"
        if self.gb_per_s is not None:
            text += f" {self.gb_per_s:6.2f} GB/s"
            if self.host_gb_per_s:
                text += f", {self.gb_per_s / self.host_gb_per_s:.2f} of host path's {self.host_gb_per_s:.2f}"
            text += f" ({self.tool})"
        return f"{text} {self.why}".rstrip()


def lines(row: Row) -> list[Line]:
    """Summarise a row, the fastest tool first."""
    reference, first = row.samples.get(row.reference), row.samples.get(row.first)
    found = [
        Line(
            name,
            row.groups[name],
            median(one.gb_per_s for one in samples),
            min(one.gb_per_s for one in samples),
            max(one.gb_per_s for one in samples),
            median(one.cpu_s_per_gb for one in samples),
            ratio(samples, reference),
            ratio(first, samples),
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


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Return the outcome of every row."""
    by_key = {row.key: row for row in rows}
    return [_outcome(row, by_key.get(_HOST_ROW.get(row.key, ""))) for row in rows]


def _outcome(row: Row, host: Row | None) -> Outcome:
    speed = next((_disk_speed(line) for line in lines(row) if line.name == row.first), None)
    to_host = host.samples.get(ours.TO_HOST, []) if host else []
    host_speed = median(one.gb_per_s for one in to_host) if to_host else None
    status: Literal["passed", "failed", "left out"] = "passed"
    why = ""
    if row.failure:
        status, why = "failed", row.failure
    elif row.not_offered:
        status, why = "left out", row.not_offered
    elif row.first and speed is None:
        status, why = "failed", row.left_out.get(row.first, "no round was counted")
    return Outcome(row.key, status, why, row.first, speed, host_speed)


def _disk_speed(line: Line) -> float:
    """Return the speed from the disk, even if the row counts other bytes."""
    return line.extra.get("read_gb_per_s", line.gb_per_s)


def judge(rows: list[Row]) -> list[Verdict]:
    """Return the verdict on every target."""
    verdicts: list[Verdict] = []
    for row in rows:
        if not row.first:
            continue
        if row.reference == ours.TO_HOST:
            verdicts.append(_beside(row, row.first, ours.TO_HOST, _TO_HOST_RATIO))
            verdicts.append(_beside(row, ours.GDS, "kvikio", 1.0))
        baselines = [name for name, group in row.groups.items() if group == "baseline"]
        verdicts.extend(_beside(row, row.counterparts.get(name, row.first), name, 1.0) for name in baselines)
        if row.key in ("read", "write", "load"):
            verdicts.append(_cpu(row, row.first))
        if row.key == "checkpoint":
            verdicts.append(_lost(row))
    return verdicts


def _beside(row: Row, one: str, other: str, wanted: float) -> Verdict:
    measured = ratio(row.samples.get(one), row.samples.get(other))
    why = "; ".join(f"{name}: {row.left_out[name]}" for name in (one, other) if name in row.left_out)
    met = None if measured is None else measured >= wanted
    return Verdict(f"{row.key}: {one} beside {other}", f">= {wanted}", measured, met, why)


def _cpu(row: Row, first: str) -> Verdict:
    by_name = {line.name: line for line in lines(row)}
    others = [line for line in by_name.values() if line.group == "baseline"]
    about = f"{row.key}: CPU s/GB of {first}"
    if first not in by_name or not others:
        return Verdict(about, "less than any other's", None, None, row.left_out.get(first, "there is no other"))
    least = min(others, key=lambda line: line.cpu_s_per_gb)
    measured = by_name[first].cpu_s_per_gb
    return Verdict(about, f"<= {least.cpu_s_per_gb:.3f} of {least.name}", measured, measured <= least.cpu_s_per_gb)


def _lost(row: Row) -> Verdict:
    lost = {line.name: line.extra["lost_s"] for line in lines(row)}
    about = "checkpoint: seconds of training lost by a save"
    if checkpoint.OURS not in lost or checkpoint.BASELINE not in lost:
        return Verdict(about, f"less than with {checkpoint.BASELINE}", None, None, row.failure)
    mine, theirs = lost[checkpoint.OURS], lost[checkpoint.BASELINE]
    return Verdict(about, f"<= {theirs:.3f} with {checkpoint.BASELINE}", mine, mine <= theirs)


def row_record(row: Row) -> dict[str, Any]:
    """Return a row as JSON-ready values."""
    return {
        "key": row.key,
        "title": row.title,
        "reference": row.reference,
        "lines": [asdict(line) for line in lines(row)],
        "samples": {name: [one.record() for one in samples] for name, samples in row.samples.items()},
        "settings": row.settings,
        "left_out": row.left_out,
        "notes": row.notes,
        "failure": row.failure,
        "not_offered": row.not_offered,
        "stacks": row.stacks,
    }


def table(row: Row) -> str:
    """Draw a row for people."""
    heads = f"{'':48} {'GB/s':>6} {'min - max':>15} {'CPU s/GB':>9} {'of ref.':>8} {'ours x':>7}"
    drawn = [f"\n{row.key}: {row.title}"]
    drawn += [heads] if row.samples else []
    for line in lines(row):
        spread = f"{line.min_gb_per_s:.2f} - {line.max_gb_per_s:.2f}"
        ratios = [f"{one:.2f}" if one is not None else "-" for one in (line.of_reference, line.ours_beside)]
        metrics = f"{line.gb_per_s:6.2f} {spread:>15} {line.cpu_s_per_gb:9.3f}"
        extra = "".join(f"  {key} {value:.4g}" for key, value in line.extra.items())
        drawn.append(f"{line.name:48} {metrics} {ratios[0]:>8} {ratios[1]:>7}{extra}")
    drawn += [f"left out: {name}: {why}" for name, why in row.left_out.items()]
    drawn += [f"note: {note}" for note in row.notes]
    drawn += [f"FAILED: {row.failure}"] if row.failure else []
    drawn += [f"left out: {row.not_offered}"] if row.not_offered else []
    drawn += [row.stacks] if row.stacks else []
    return "\n".join(drawn)


def text(rows: list[Row]) -> str:
    """Draw the outcome of each row, the verdicts, the skipped tools and the timelines."""
    found = ["targets", *(str(verdict) for verdict in judge(rows))]
    for row in rows:
        for kind, metrics in row.metrics.items():
            hidden = metrics.get("copies_hidden")
            said = f"{hidden:.1%} of copying overlapped with the disk" if hidden is not None else "no copies"
            found.append(f"timeline of a {kind}: {metrics.get('failed', said)}")
    found += ["", "tools that did not run"]
    found += [f"{row.key:10} {name}: {why}" for row in rows for name, why in row.left_out.items()]
    return "\n".join([*found, "", "rows", *(str(outcome) for outcome in outcomes(rows))])
