"""The plot: one panel for each row, medians as bars, minimum and maximum as whiskers, as SVG and PNG.

``python -m storagebench.plot RECORD.json`` draws a record again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from common import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"deepnvme": "#1f6feb", "fio": "#57606a", "DeepSpeed": "#d29922", "comparison": "#c9d1d9"}
_METRICS = {"GB/s": "gb_per_s", "us": "median_us", "reads/s": "wall_s"}
_COLUMNS = 2


def draw(record_path: Path) -> list[Path]:
    """Draw a record into its folder and return the new files."""
    record: dict[str, Any] = json.loads(record_path.read_text(encoding="utf-8"))
    rows = [row for row in record["rows"] if row["lines"]]
    if not rows:
        return []
    depth = -(-len(rows) // _COLUMNS)
    height = sum(
        0.9 + 0.24 * max(len(row["lines"]) for row in rows[first : first + _COLUMNS])
        for first in range(0, len(rows), _COLUMNS)
    )
    figure, panels = plt.subplots(depth, _COLUMNS, figsize=(14, height + 0.8), squeeze=False)
    for panel, row in zip(panels.flat, rows, strict=False):
        _panel(panel, row)
    for panel in list(panels.flat)[len(rows) :]:
        panel.axis("off")
    environment = record["environment"]
    disk = environment["disk"]
    figure.suptitle(
        f"deepnvme {environment['versions'].get('deepnvme', '')}: {record['date'][:10]}, "
        f"Linux {environment['kernel']}, {environment['cpu']} x{environment['cpu_count']}, "
        f"{disk.get('file_system', '')} on {disk.get('driver', '')}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figure.legend(
        handles=[Patch(color=colour, label=group) for group, colour in _COLOURS.items()],
        ncols=len(_COLOURS),
        loc="upper right",
        fontsize=8,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / (height + 0.8)))
    return picture.save(figure, record_path)


def _panel(panel: Axes, row: dict[str, Any]) -> None:
    smaller_is_better = row["unit"] == "us"
    # Bars are drawn from the bottom, so the best one comes last.
    lines = sorted(row["lines"], key=lambda line: line["figure"], reverse=smaller_is_better)
    ranges = [_range(row, line["name"]) for line in lines]
    values = [line["figure"] for line in lines]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ranges, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, ranges, strict=True)]
    panel.barh(
        [line["name"] for line in lines],
        values,
        xerr=[below, above],
        # Older records have another name for the last group.
        color=[_COLOURS.get(line["group"], _COLOURS["comparison"]) for line in lines],
        error_kw={"elinewidth": 0.8, "ecolor": "#24292f", "capsize": 2},
        height=0.72,
    )
    better = "smaller is better" if smaller_is_better else "larger is better"
    panel.set_title(f"{row['title']}\n{row['unit']}, {better}", fontsize=9, loc="left")
    panel.tick_params(labelsize=8)
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)


def _range(row: dict[str, Any], name: str) -> tuple[float, float]:
    samples = row["samples"][name]
    if row["unit"] == "reads/s":
        # 4 KiB a read.
        values = [sample["bytes_moved"] / 4096 / sample["wall_s"] for sample in samples]
    else:
        values = [sample[_METRICS[row["unit"]]] for sample in samples]
    return min(values), max(values)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for made in draw(Path(argument)):
            print(made.name)
