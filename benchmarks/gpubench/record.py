"""The JSON record of a run: every sample, the targets and the outcomes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from common.command import write_json
from gpubench.summary import lines
from gpubench.targets import judge, outcomes
from gpubench.work import TIMELINE

if TYPE_CHECKING:
    from pathlib import Path

    from gpubench.rows import RowResult


def write(path: Path, record: dict[str, Any], done: list[RowResult]) -> None:
    """Write the record of a run, with the rows so far."""
    record["rows"] = [_row(row) for row in done if row.key != TIMELINE]
    record["timelines"] = next((row.metrics for row in done if row.key == TIMELINE), {})
    record["targets"] = [asdict(verdict) for verdict in judge(done)]
    record["outcomes"] = [asdict(outcome) for outcome in outcomes(done)]
    write_json(path, record)


def _row(row: RowResult) -> dict[str, Any]:
    return {
        "key": row.key,
        "title": row.title,
        "reference": row.reference,
        "lines": [asdict(line) for line in lines(row)],
        "samples": {name: [one.to_json() for one in samples] for name, samples in row.samples.items()},
        "settings": row.settings,
        "left_out": row.left_out,
        "notes": row.notes,
        "failure": row.failure,
        "not_offered": row.not_offered,
        "stacks": row.stacks,
    }
