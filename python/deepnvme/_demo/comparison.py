"""How the demo compares two tools: rates in rounds, a table and a picture of them, and files that are not cached."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median_low

_BAR_COLUMNS = 24
_FONT = 'font-family="sans-serif" font-size="13"'
_ROW_PX, _LEFT_PX, _WIDTH_PX, _HEAD_PX = 56, 150, 640, 44


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


def drop(path: Path) -> bool:
    """Remove a file from the page cache. Returns whether all of it is gone.

    After an fsync every page is clean, and ``posix_fadvise`` can drop it. If pages remain, root can drop the page cache
    of the whole machine.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(path) > 0 and os.geteuid() == 0:
        # The root of a container may not.
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
    return cached_share(path) == 0


def cached_share(path: Path) -> float:
    """Return the share of the file's pages in the page cache, from 0 to 1."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapping:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first  # a mapping that something points into cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return bytes(page & 1 for page in pages).count(1) / len(pages)


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


def write_picture(path: Path, comparisons: list[Comparison]) -> None:
    """Write bars of the rates in the table as SVG. Each pair has its own scale."""
    shown = [one for one in comparisons if not one.missing]
    width, height = _LEFT_PX + _WIDTH_PX, _HEAD_PX + _ROW_PX * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {_FONT}>',
        f'<rect width="100%" height="{height}" fill="white"/>',
        '<text x="12" y="26" font-size="16">deepnvme compared with torch and accelerate (longer is faster)</text>',
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


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"  # noqa: PLR2004
