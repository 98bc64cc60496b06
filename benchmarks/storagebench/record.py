"""The dated JSON record of a run: every sample, every sweep, the environment and the verdicts."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from common.command import write_json
from storagebench.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

    from common.verdict import Verdict
    from storagebench.registry import Registry
    from storagebench.rounds import RowResult
    from storagebench.settings import Settings


def write(  # noqa: PLR0913 - a record is the sum of its parts
    folder: Path,
    name: str,
    *,
    settings: Settings,
    environment: dict[str, object],
    registry: Registry,
    results: list[RowResult],
    verdicts: list[Verdict],
) -> Path:
    """Write ``<date>-<name>.json`` and return its path; an older record of the same name is replaced."""
    now = datetime.now(tz=timezone.utc)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "row_set": name,
        "environment": environment,
        "settings": asdict(settings),
        "missing": registry.missing,
        "sweeps": registry.sweeps,
        "rows": [_row(result) for result in results],
        "targets": [asdict(verdict) for verdict in verdicts],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now.date().isoformat()}-{name}.json"
    write_json(path, record)
    return path


def _row(result: RowResult) -> dict[str, object]:
    return {
        **asdict(summarise(result)),
        "settings": {one.name: one.settings() for one in result.complete() if one.settings()},
        "samples": {name: [sample.to_json() for sample in samples] for name, samples in result.samples.items()},
        "left_out": result.left_out,
        "failed": result.failed,
    }
