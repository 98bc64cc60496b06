"""Save the chart of a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


def save(figure: Figure, record_path: Path) -> list[Path]:
    """Save a figure as SVG and PNG next to its record, and close it. Returns the new files."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - a machine without it still measures

    made = [record_path.with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in made:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return made
