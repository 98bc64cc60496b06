"""The targets of deepnvme, and the outcome of each row."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from common.verdict import Verdict
from gpubench import checkpoint, ours
from gpubench.summary import Line, lines, ratio

if TYPE_CHECKING:
    from gpubench.rows import RowResult

_HOST_RATIO = 0.95
#: The row that moves host memory in the same direction.
_HOST_ROW = {"read": "read", "write": "write", "load": "read", "stream": "read", "checkpoint": "write"}


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
                text += f", {self.gb_per_s / self.host_gb_per_s:.2f} of the host path's {self.host_gb_per_s:.2f}"
            text += f" ({self.tool})"
        return f"{text} {self.why}".rstrip()


def outcomes(rows: list[RowResult]) -> list[Outcome]:
    """Return the outcome of every row."""
    by_key = {row.key: row for row in rows}
    return [_outcome(row, by_key.get(_HOST_ROW.get(row.key, ""))) for row in rows]


def _outcome(row: RowResult, host: RowResult | None) -> Outcome:
    speed = next((_disk_speed(line) for line in lines(row) if line.name == row.ours), None)
    in_host = host.samples.get(ours.HOST, []) if host else []
    host_speed = median(one.gb_per_s for one in in_host) if in_host else None
    status: Literal["passed", "failed", "left out"] = "passed"
    why = ""
    if row.failure:
        status, why = "failed", row.failure
    elif row.not_offered:
        status, why = "left out", row.not_offered
    elif row.ours and speed is None:
        status, why = "failed", row.left_out.get(row.ours, "no round was counted")
    return Outcome(row.key, status, why, row.ours, speed, host_speed)


def _disk_speed(line: Line) -> float:
    """Return the speed from the disk, even if the row counts other bytes."""
    return line.extra.get("read_gb_per_s", line.gb_per_s)


def judge(rows: list[RowResult]) -> list[Verdict]:
    """Return the verdict on every target."""
    verdicts: list[Verdict] = []
    for row in rows:
        if not row.ours:
            continue
        if row.reference == ours.HOST:
            verdicts.append(_compare_speeds(row, row.ours, ours.HOST, _HOST_RATIO))
            verdicts.append(_compare_speeds(row, ours.GDS, "kvikio", 1.0))
        baselines = [name for name, group in row.groups.items() if group == "baseline"]
        verdicts.extend(_compare_speeds(row, row.counterparts.get(name, row.ours), name, 1.0) for name in baselines)
        if row.key in ("read", "write", "load"):
            verdicts.append(_cpu(row, row.ours))
        if row.key == "checkpoint":
            verdicts.append(_lost(row))
    return verdicts


def _compare_speeds(row: RowResult, one: str, other: str, goal: float) -> Verdict:
    measured = ratio(row.samples.get(one), row.samples.get(other))
    why = "; ".join(f"{name}: {row.left_out[name]}" for name in (one, other) if name in row.left_out)
    met = None if measured is None else measured >= goal
    return Verdict(f"{row.key}: {one} compared with {other}", f">= {goal}", measured, met, why)


def _cpu(row: RowResult, first: str) -> Verdict:
    by_name = {line.name: line for line in lines(row)}
    others = [line for line in by_name.values() if line.group == "baseline"]
    about = f"{row.key}: CPU s/GB of {first}"
    goal = "at most any other's"
    if first not in by_name:
        return Verdict(about, goal, None, None, row.left_out.get(first) or row.failure or "no round was counted")
    if not others:
        return Verdict(about, goal, None, None, "no baseline was measured")
    least = min(others, key=lambda line: line.cpu_s_per_gb)
    measured = by_name[first].cpu_s_per_gb
    return Verdict(about, f"<= {least.cpu_s_per_gb:.3f} of {least.name}", measured, measured <= least.cpu_s_per_gb)


def _lost(row: RowResult) -> Verdict:
    lost = {line.name: line.extra["lost_s"] for line in lines(row)}
    about = "checkpoint: seconds of training lost by a save"
    missing = [name for name in (checkpoint.OURS, checkpoint.BASELINE) if name not in lost]
    if missing:
        why = "; ".join(f"{name}: {row.left_out.get(name) or 'no round was counted'}" for name in missing)
        return Verdict(about, f"at most that with {checkpoint.BASELINE}", None, None, row.failure or why)
    mine, theirs = lost[checkpoint.OURS], lost[checkpoint.BASELINE]
    return Verdict(about, f"<= {theirs:.3f} with {checkpoint.BASELINE}", mine, mine <= theirs)
