"""Runs all rows on one GPU. The record is written after each row, so an interrupted run keeps its rows."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import environment
from gpubench import plot, table, watchdog
from gpubench.job import Job
from gpubench.record import write
from gpubench.rows import RowResult
from gpubench.tool import reason
from gpubench.work import KEYS

#: A row gets this time in addition to twice that of its rounds: for its data, trials, and the last round.
_ROW_EXTRA_S = 30.0
#: A turn may take at least this time. A row is begun if at least this time is left.
_TURN_S_MIN = 20.0
_ROW_S_MIN = _TURN_S_MIN


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    nbytes: int
    model_nbytes: int
    rounds: int
    #: A row begins no other round after this many seconds.
    rounds_s: float
    #: All rows together end within this time.
    minutes: float
    keys: Sequence[str] = KEYS
    is_rehearsal: bool = False

    def limits(self, left_s: float) -> watchdog.Limits:
        """Return the limits of the next row."""
        row_s = min(2 * self.rounds_s + _ROW_EXTRA_S, left_s)
        return watchdog.Limits(row_s, max(_TURN_S_MIN, row_s / 2))


def run(plan: Plan, scratch: Path, results: Path) -> dict[str, Any]:
    """Run the rows one after the other. Returns the record, which is also in the folder of results."""
    results.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".gpubench-", dir=scratch))
    path = results / f"{time.strftime('%Y-%m-%d')}-gpu.json"
    end = time.monotonic() + plan.minutes * 60
    done: list[RowResult] = []
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "environment": environment.describe(folder),
        "gpu": {},
        "is_rehearsal": plan.is_rehearsal,
        "nbytes": plan.nbytes,
        "model_nbytes": plan.model_nbytes,
        "rounds": plan.rounds,
        "timelines": {},
    }
    try:
        for key in plan.keys:
            began = time.monotonic()
            job = Job(
                key,
                plan.is_rehearsal,
                str(folder / key),
                plan.nbytes,
                plan.model_nbytes,
                plan.rounds,
                plan.rounds_s,
                row_path=str(folder / f"{key}-row.json"),
                stem=str(path.with_suffix("")),
            )
            if (left_s := end - began) < _ROW_S_MIN:
                row = RowResult(key, failure=f"not begun: the {plan.minutes:g} minutes of the whole run are over")
            else:
                row, facts = watchdog.run(job, folder, plan.limits(left_s))
                record["gpu"] = record["gpu"] or facts
            shutil.rmtree(job.scratch, ignore_errors=True)
            done.append(row)
            print(f"{table.table(row)}\n({time.monotonic() - began:.0f} s)", flush=True)
            write(path, record, done)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{table.text(done)}")
    print(_plot(path))
    return record


def _plot(path: Path) -> str:
    try:
        plots = [str(file) for file in plot.draw(path)]
    except ImportError as error:
        elsewhere = f"draw it on a machine with matplotlib: `python -m gpubench.plot {path.name}`"
        return f"written: {path}; no plot: {reason(error)}; {elsewhere}"
    return f"written: {', '.join([str(path), *plots])}"
