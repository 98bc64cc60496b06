"""Records one transfer of each kind: how much of the copies overlaps with the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepnvme

from gpubench.data import random_bytes
from gpubench.rows import RoundLimits, RowResult, make_cold_or_note
from gpubench.tool import Setup, reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_KEPT = (
    "seconds",
    "ops",
    "bytes_read",
    "bytes_written",
    "bytes_bounced",
    "bytes_gds",
    "disk_busy_s",
    "copies",
    "bytes_copied",
    "copies_busy_s",
    "disk_overlap",
)


def record(setup: Setup, row: RowResult, limits: RoundLimits, stem: Path) -> RowResult:
    """Read and write with bounce buffers, once each to warm up and once recorded; metrics by kind.

    ``<stem>-read.html`` and ``-write.html`` are pages, the ``.trace.json`` files next to them are for Perfetto.
    """
    row.title = "one recorded read and write"
    path = setup.scratch / "timeline.bin"
    tensor = setup.gpu.tensor(random_bytes(setup.nbytes))
    with deepnvme.Engine() as engine:

        def read() -> None:
            engine.read(tensor, path)

        def write() -> None:
            engine.write(tensor, path, durability="data")

        steps: tuple[tuple[str, Callable[[], None]], ...] = (("write", write), ("read", read))
        for kind, step in steps:
            row.begin(f"timeline of a {kind}")
            limits.save(row)
            try:
                step()
                if kind == "read":
                    make_cold_or_note(path, row)
                row.metrics[kind] = _recorded(engine, step, stem.with_name(f"{stem.name}-{kind}"))
            except Exception as error:  # noqa: BLE001 - the other kind is recorded without it
                row.failure = reason(error)
                row.metrics[kind] = {"failed": row.failure}
    path.unlink(missing_ok=True)
    return row


def _recorded(engine: deepnvme.Engine, step: Callable[[], None], stem: Path) -> dict[str, Any]:
    page, perfetto = stem.with_name(stem.name + ".html"), stem.with_name(stem.name + ".trace.json")
    with engine.trace(page) as trace, engine.trace(perfetto):
        step()
    summary = trace.summary()
    return {key: summary[key] for key in _KEPT}
