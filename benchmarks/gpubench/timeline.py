"""Records one transfer of each kind: how much of the copies overlaps with the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepnvme

from gpubench.rows import make_cold
from gpubench.tool import reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpubench.rows import Row, Transfers

_KEPT = (
    "seconds",
    "transfers",
    "bytes_read",
    "bytes_written",
    "bytes_bounced",
    "bytes_gds",
    "disk_busy_s",
    "copies",
    "bytes_copied",
    "copies_busy_s",
    "copies_hidden",
)


def record(transfers: Transfers, stem: Path, row: Row) -> dict[str, dict[str, Any]]:
    """Read and write with bounce buffers, once each to warm up and once recorded; metrics by kind.

    ``<stem>-read.html`` and ``-write.html`` are pages, the ``.trace.json`` beside them is for Perfetto.
    """
    place = transfers.place
    path = place.scratch / "timeline.bin"
    tensor = place.gpu.tensor(transfers.host)
    metrics: dict[str, dict[str, Any]] = {}
    with deepnvme.Engine() as engine:

        def read() -> None:
            engine.read(tensor, path)

        def write() -> None:
            engine.write(tensor, path, durability="data")

        steps: tuple[tuple[str, Callable[[], None]], ...] = (("write", write), ("read", read))
        for kind, step in steps:
            try:
                step()
                if kind == "read":
                    make_cold(path, row)
                metrics[kind] = _recorded(engine, step, stem.with_name(f"{stem.name}-{kind}"))
            except Exception as error:  # noqa: BLE001 - the metrics of the rows are there without it
                metrics[kind] = {"failed": reason(error)}
    path.unlink(missing_ok=True)
    return metrics


def _recorded(engine: deepnvme.Engine, step: Callable[[], None], stem: Path) -> dict[str, Any]:
    page, perfetto = stem.with_name(stem.name + ".html"), stem.with_name(stem.name + ".trace.json")
    with engine.trace(page) as trace, engine.trace(perfetto):
        step()
    summary = trace.summary()
    return {key: summary[key] for key in _KEPT}
