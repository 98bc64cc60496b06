"""Runs all rows on one GPU. The record is written after each row, so an interrupted run keeps its rows."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpubench import baselines, loaders, ours, plot, rows, summary, timeline
from gpubench.tool import Place, made, reason
from storagebench import environment

if TYPE_CHECKING:
    from gpubench.gpu import Gpu

MOVERS = (
    ours.Bounce,
    ours.Gds,
    ours.Mark,
    ours.ThenCopy,
    baselines.PythonCopy,
    baselines.DeepSpeed,
    baselines.Kvikio,
    baselines.Fio,
)


def run(gpu: Gpu, scratch: Path, results: Path, *, nbytes: int, pace: rows.Pace) -> dict[str, Any]:
    """Compare reads, writes and loads; returns the record, which is also in the folder of results."""
    results.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".gpubench-", dir=scratch))
    path = results / f"{time.strftime('%Y-%m-%d')}-gpu.json"
    place = Place(gpu, folder, nbytes)
    done: list[rows.Row] = []
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "environment": environment.describe(folder),
        "gpu": gpu.facts(),
        "nbytes": nbytes,
        "rounds": pace.rounds,
        "timelines": {},
    }
    try:
        transfers = rows.Transfers(place)
        for key in ("read", "write", "load"):
            done.append(_row(key, place, transfers, pace))
            print(summary.table(done[-1]), flush=True)
            _write(path, record, done)
        record["timelines"] = timeline.record(transfers, path.with_suffix(""), done[0])
        _write(path, record, done)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print()
    for verdict in summary.judge(done):
        print(verdict)
    for kind, metrics in record["timelines"].items():
        hidden = metrics.get("copies_hidden")
        said = (
            f"{hidden:.1%} of copying hidden behind the disk"
            if hidden is not None
            else metrics.get("failed", "no copies")
        )
        print(f"timeline of a {kind}: {said}")
    print(_drawn(path))
    return record


def _row(key: str, place: Place, transfers: rows.Transfers, pace: rows.Pace) -> rows.Row:
    if key == "load":
        loading, left_out = made(loaders.KINDS, [kind.name for kind in loaders.KINDS], place)
        row = rows.load(place, loading, left_out, pace)
        row.groups = {kind.name: kind.group for kind in loaders.KINDS}
        return row
    moving, left_out = made(MOVERS, [kind.name for kind in MOVERS], place)
    measure = transfers.read if key == "read" else transfers.write
    row = measure(moving, left_out, pace)
    row.groups = {kind.name: kind.group for kind in MOVERS}
    return row


def _write(path: Path, record: dict[str, Any], done: list[rows.Row]) -> None:
    record["rows"] = [summary.row_record(row) for row in done]
    record["targets"] = [asdict(verdict) for verdict in summary.judge(done)]
    private = path.with_suffix(f".{os.getpid()}.tmp")
    private.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    private.replace(path)


def _drawn(path: Path) -> str:
    try:
        made = [one.name for one in plot.draw(path)]
    except ImportError as error:
        elsewhere = f"python -m gpubench.plot {path.name} draws it elsewhere"
        return f"written: {path.name}; not drawn: {reason(error)}; {elsewhere}"
    return f"written: {', '.join([path.name, *made])}"
