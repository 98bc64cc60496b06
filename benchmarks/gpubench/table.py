"""Rows and their outcome as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpubench.summary import lines
from gpubench.targets import judge, outcomes

if TYPE_CHECKING:
    from gpubench.rows import RowResult


def table(row: RowResult) -> str:
    """Draw a row for people."""
    heads = f"{'':48} {'GB/s':>6} {'min - max':>15} {'CPU s/GB':>9} {'of ref.':>8} {'ours x':>7}"
    drawn = [f"\n{row.key}: {row.title}"]
    drawn += [heads] if row.samples else []
    for line in lines(row):
        spread = f"{line.min_gb_per_s:.2f} - {line.max_gb_per_s:.2f}"
        ratios = [f"{one:.2f}" if one is not None else "-" for one in (line.of_reference, line.ours_ratio)]
        metrics = f"{line.gb_per_s:6.2f} {spread:>15} {line.cpu_s_per_gb:9.3f}"
        extra = "".join(f"  {key} {value:.4g}" for key, value in line.extra.items())
        drawn.append(f"{line.name:48} {metrics} {ratios[0]:>8} {ratios[1]:>7}{extra}")
    drawn += [f"left out: {name}: {why}" for name, why in row.left_out.items()]
    drawn += [f"note: {note}" for note in row.notes]
    drawn += [f"FAILED: {row.failure}"] if row.failure else []
    drawn += [f"left out: {row.not_offered}"] if row.not_offered else []
    drawn += [row.stacks] if row.stacks else []
    return "\n".join(drawn)


def text(rows: list[RowResult]) -> str:
    """Draw the outcome of each row, the verdicts, the skipped tools and the timelines."""
    found = ["targets", *(str(verdict) for verdict in judge(rows))]
    for row in rows:
        for kind, metrics in row.metrics.items():
            overlap = metrics.get("disk_overlap")
            said = f"{overlap:.1%} of copying overlapped with the disk" if overlap is not None else "no copies"
            found.append(f"timeline of a {kind}: {metrics.get('failed', said)}")
    found += ["", "tools that did not run"]
    found += [f"{row.key:10} {name}: {why}" for row in rows for name, why in row.left_out.items()]
    return "\n".join([*found, "", "rows", *(str(outcome) for outcome in outcomes(rows))])
