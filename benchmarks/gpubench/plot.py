"""A record as a picture: a panel for each row, medians as bars, ranges as whiskers, the reference as a line.

``python -m gpubench.plot RECORD.json`` draws a record again, also one from a machine without matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common import picture

_COLOURS = {"deepnvme": "#1f6feb", "host": "#8fb8f6", "ceiling": "#3fb950", "baseline": "#d29922", "fio": "#8b949e"}
_NAMES = {
    "deepnvme": "deepnvme",
    "host": "deepnvme to host memory",
    "ceiling": "without the disk",
    "baseline": "others",
    "fio": "fio",
}


#: Groups in older records by their present names.
_RENAMED = {"mark": "host"}


def draw(record_path: Path) -> list[Path]:
    """Draw a record into its folder and return the new files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    record: dict[str, Any] = json.loads(record_path.read_text(encoding="utf-8"))
    rows = [row for row in record["rows"] if row["lines"]]
    if not rows:
        return []
    heights = [1.1 + 0.32 * len(row["lines"]) for row in rows]
    figure, panels = plt.subplots(
        len(rows), 1, figsize=(10, sum(heights) + 0.7), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for panel, row in zip(panels.flat, rows, strict=True):
        _panel(panel, row)
    gpu, disk = record["gpu"], record["environment"]["disk"]
    versions = record["environment"]["versions"]
    figure.suptitle(
        f"deepnvme {versions.get('deepnvme', '')}: {record['date'][:10]}, {gpu.get('name', '')}, "
        f"{record['environment']['cpu']} x{record['environment']['cpu_count']}, "
        f"{disk.get('file_system', '')} on {disk.get('driver', '')}",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    handles = [Patch(color=colour, label=_NAMES[group]) for group, colour in _COLOURS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="lower right", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    return picture.save(figure, record_path)


def _panel(panel: Any, row: dict[str, Any]) -> None:
    # Bars are drawn from the bottom; the fastest ends up at the top.
    lines = row["lines"][::-1]
    values = [line["gb_per_s"] for line in lines]
    spread = [
        [max(0.0, value - line["min_gb_per_s"]) for value, line in zip(values, lines, strict=True)],
        [max(0.0, line["max_gb_per_s"] - value) for value, line in zip(values, lines, strict=True)],
    ]
    panel.barh(
        [line["name"] for line in lines],
        values,
        xerr=spread,
        color=[_colour(line) for line in lines],
        error_kw={"elinewidth": 0.8, "ecolor": "#24292f", "capsize": 2},
        height=0.7,
    )
    # Older records do not name the reference.
    reference = row.get("reference") or next((line["name"] for line in lines if line["group"] == "mark"), "")
    for line in lines:
        if line["name"] == reference:
            panel.axvline(line["gb_per_s"], color=_colour(line), linewidth=1, linestyle="--", zorder=0)
    panel.set_title(f"{row['title']}\nGB/s, larger is better", fontsize=9, loc="left")
    panel.tick_params(labelsize=8)
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)


def _colour(line: dict[str, Any]) -> str:
    return _COLOURS[_RENAMED.get(line["group"], line["group"])]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for made in draw(Path(argument)):
            print(made.name)
