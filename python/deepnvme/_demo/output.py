"""The demo's output: a progress line on a terminal, one table, one picture."""

from __future__ import annotations

import shutil
import sys
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme._demo.comparison import Comparison

_BAR_COLUMNS = 24
_FONT = 'font-family="sans-serif" font-size="13"'
_ROW_PX, _LEFT_PX, _WIDTH_PX, _HEAD_PX = 56, 150, 640, 44


class StepProgress:
    """One line on stderr. Silent if stderr is not a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self._is_shown = sys.stderr.isatty()

    def step(self, label: str) -> None:
        """Begin the next step."""
        if self._is_shown:
            filled = min(self._done * _BAR_COLUMNS // self._steps, _BAR_COLUMNS)
            line = f"[{'#' * filled:<{_BAR_COLUMNS}}] {label}"
            sys.stderr.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
        self._done += 1

    def close(self) -> None:
        """Remove the line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def table(comparisons: list[Comparison]) -> str:
    """Return both rates of the round with the median ratio, and that ratio."""
    rows = [f"{'':<15}{'today':<18}{'rate':>8}{'deepnvme':>10}  {'':<18}{'ratio':>6}".rstrip()]
    for one in comparisons:
        if one.missing:
            rows.append(f"{one.work:<15}{one.tool:<18}  not measured: {one.missing}")
            continue
        theirs, ours = map(_number, one.middle_round)
        rows.append(f"{one.work:<15}{one.tool:<18}{theirs:>8}{ours:>10}  {one.unit:<18}{one.ratio:>5.1f}x")
    notes = [f"  {one.work}: {one.note}" for one in comparisons if one.note]
    return "\n".join([*rows, *notes])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"  # noqa: PLR2004


def write_picture(path: Path, comparisons: list[Comparison]) -> None:
    """Write bars of the rates in the table as SVG. Each pair has its own scale."""
    shown = [one for one in comparisons if not one.missing]
    width, height = _LEFT_PX + _WIDTH_PX, _HEAD_PX + _ROW_PX * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {_FONT}>',
        f'<rect width="100%" height="{height}" fill="white"/>',
        '<text x="12" y="26" font-size="16">deepnvme beside torch and accelerate (longer is faster)</text>',
    ]
    for index, one in enumerate(shown):
        top = _HEAD_PX + index * _ROW_PX
        theirs, ours = one.middle_round
        scale = (_WIDTH_PX - 240) / max(theirs, ours)
        parts.append(f'<text x="12" y="{top + 26}">{escape(one.work)}</text>')
        bars = ((theirs, "#b0b7c3", one.tool), (ours, "#2f6fdf", "deepnvme"))
        for offset, (rate, colour, label) in zip((2, 24), bars, strict=True):
            length = max(rate * scale, 1)
            text = f"{label}: {_number(rate)} {one.unit}"
            parts.append(
                f'<rect x="{_LEFT_PX}" y="{top + offset}" width="{length:.0f}" height="18" fill="{colour}"/>'
                f'<text x="{_LEFT_PX + length + 6:.0f}" y="{top + offset + 14}">{escape(text)}</text>'
            )
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")
