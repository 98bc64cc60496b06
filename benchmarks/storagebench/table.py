"""Prints rows as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storagebench.rounds import RowResult
    from storagebench.summary import Line, RowSummary

_MIB = 1 << 20
_HEADS = ("tool", "median", "wall s", "min - max s", "CPU s/GB", "x fio best", "x DeepSpeed")


def render(summary: RowSummary, result: RowResult) -> str:
    """Return one row as text, the fastest tool first."""
    upwards = summary.unit == "us"
    lines = sorted(summary.lines, key=lambda line: line.figure, reverse=not upwards)
    grid = [_HEADS, *(_cells(line, summary.unit) for line in lines)]
    widths = [max(len(cells[column]) for cells in grid) for column in range(len(_HEADS))]
    text = [f"\n{summary.key}: {summary.title} ({_amount(summary)}, {summary.rounds} rounds)"]
    for index, cells in enumerate(grid):
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        text.append("  ".join([cells[0].ljust(len(first)), *rest]))
        if index == 0:
            text.append("  ".join("-" * width for width in widths))
    text.append(f"fio best: {summary.best_fio or 'none'}; DeepSpeed: {summary.best_deepspeed or 'none'}")
    for what, reasons in (("left out", result.left_out), ("FAILED", result.failed)):
        text.extend(f"{what}: {name}: {reason}" for name, reason in reasons.items())
    return "\n".join(text)


def _cells(line: Line, unit: str) -> tuple[str, ...]:
    metric = f"{line.figure:,.0f}" if unit == "reads/s" else f"{line.figure:.2f}"
    if "p99_us" in line.extra and unit == "us":
        metric = f"{metric} (p99 {line.extra['p99_us']:.0f})"
    return (
        line.name,
        f"{metric} {unit}",
        f"{line.wall_s:.3f}",
        f"{line.wall_s_min:.3f} - {line.wall_s_max:.3f}",
        f"{line.cpu_s_per_gb:.3f}",
        _ratio(line.ratio_to_fio),
        _ratio(line.ratio_to_deepspeed),
    )


def _amount(summary: RowSummary) -> str:
    return f"{summary.bytes_moved / _MIB:.0f} MiB"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
