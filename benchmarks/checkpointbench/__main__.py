"""``python -m checkpointbench``: save and load every state with every tool, in alternating rounds."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from checkpointbench.limit import Fio, FioAsMuchMemory
from checkpointbench.states import STATES, State
from checkpointbench.tools import Tool, all_tools
from checkpointbench.workers import Job, Workers, sums
from common import cache, command, fio, hugepages
from common.disk_idle import DiskIdleProbe, idle_disk
from common.measure import Sample, timed
from common.not_offered import NotOffered
from common.round_order import order


@dataclass
class Results:
    """Samples by row and tool, and the skipped tools."""

    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, row: str, name: str, sample: Sample) -> None:
        """Take a sample."""
        self.samples.setdefault(row, {}).setdefault(name, []).append(sample)


@dataclass
class Place:
    """Where it is measured, and how often."""

    scratch: Path
    rounds: int
    disk: DiskIdleProbe


def measure(model: str, state: State, place: Place, results: Results) -> None:
    """Run all rounds of one state."""
    scratch = place.scratch
    size = sum(tensor.nbytes for tensor in state.values())
    tools: list[Tool] = all_tools()
    if fio.version() is not None:
        tools.insert(0, Fio(scratch / "sweep.raw", size, huge=hugepages.free_bytes() >= 128 << 20))
        print(f"{model}: fio: {tools[0]}", flush=True)
        tools.insert(1, FioAsMuchMemory(size))
    suffixes = {one.name: one.suffix for one in tools}
    paths = {one.name: scratch / f"state{suffixes[one.written_by or one.name]}" for one in tools}
    readers = {
        one.name: [other for other in tools if other.loads and (other.written_by or other.name) == one.name]
        for one in tools
    }
    small = _save_small(tools, scratch / "small")
    expected = sums(state)
    workers = Workers()
    for index in range(place.rounds + 1):
        for one in order([one for one in tools if one.saves], index):
            path = paths[one.name]
            _once(f"save {model}", one, results, index, partial(_save, one, state, path, size, place.disk))
            # Each file goes before the next one comes: the disk need not hold them all.
            for other in order(readers[one.name], index):
                there = small.get(path.name.removeprefix("state"), path)
                job = Job(other.name, str(path), str(there), size, expected if index == 0 else None)
                run = partial(_load, workers, other, path, job)
                _once(f"load {model}", other, results, index, run)
            _remove(path)
    workers.close()
    _remove(scratch / "sweep.raw")
    _remove(scratch / "small")


def _save_small(tools: list[Tool], folder: Path) -> dict[str, Path]:
    """Save a small state with each tool. Returns the paths by file suffix."""
    _remove(folder)
    folder.mkdir()
    paths = {}
    for one in tools:
        if one.saves and not isinstance(one, Fio | FioAsMuchMemory):
            path = folder / f"state{one.suffix}"
            # A tool that cannot save it is left out where the large one is saved.
            with contextlib.suppress(Exception):
                one.save({"a": torch.arange(1000)}, path)
                paths[one.suffix] = path
    return paths


def _once(row: str, one: Tool, results: Results, index: int, run: Any) -> None:
    key = f"{row}: {one.name}"
    if key in results.left_out:
        return
    try:
        sample = run()
    except NotOffered as reason:
        results.left_out[key] = str(reason)
    except Exception as error:  # noqa: BLE001 - whatever a baseline throws must not end the others' run
        results.left_out[key] = f"{type(error).__name__}: {str(error)[:300]}"
        print(f"left out: {key}: {results.left_out[key]}", file=sys.stderr)
    else:
        if index > 0:
            results.add(row, one.name, sample)


def _save(one: Tool, state: State, path: Path, size: int, disk: DiskIdleProbe) -> Sample:
    _remove(path)
    disk.wait()
    sample, _ = timed(lambda: one.save(state, path), size)
    return sample


def _load(workers: Workers, one: Tool, path: Path, job: Job) -> Sample:
    for file in [entry for entry in path.rglob("*") if entry.is_file()] if path.is_dir() else [path]:
        cache.make_cold(file)
    if isinstance(one, Fio | FioAsMuchMemory):
        workers.touch_memory(job.size)
        return timed(lambda: one.load(path), job.size)[0]
    return workers.load(job)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def summary(results: Results) -> list[dict[str, object]]:
    """Medians, and the medians of the ratios within the rounds to fio and to torch."""
    lines: list[dict[str, object]] = []
    for row, by_name in results.samples.items():
        for name, samples in sorted(by_name.items(), key=lambda item: median(one.wall_s for one in item[1])):
            line: dict[str, object] = {
                "row": row,
                "name": name,
                "wall_s": median(one.wall_s for one in samples),
                "min_s": min(one.wall_s for one in samples),
                "max_s": max(one.wall_s for one in samples),
                "gb_per_s": median(one.gb_per_s for one in samples),
                "cpu_s_per_gb": median(one.cpu_s_per_gb for one in samples),
            }
            for baseline in ("fio best", "fio, as much memory", "torch"):
                if baseline in by_name:
                    pairs = zip(samples, by_name[baseline], strict=False)
                    line[f"of {baseline}"] = median(other.wall_s / one.wall_s for one, other in pairs)
            lines.append(line)
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """Print the tables."""
    row = ""
    for line in lines:
        if line["row"] != row:
            row = line["row"]
            heads = f"{'GB/s':>6} {'wall s':>7} {'min - max':>15} {'CPU s/GB':>9}"
            baselines = f"{'x fio':>6} {'x tensor fio':>12} {'x torch':>7}"
            print(f"\n{row}\n{'':26} {heads} {baselines}")
        ratios = [
            f"{line[key]:.2f}" if key in line else "-"
            for key in ("of fio best", "of fio, as much memory", "of torch")
        ]
        spread = f"{line['min_s']:.3f} - {line['max_s']:.3f}"
        print(
            f"{line['name']:26} {line['gb_per_s']:6.2f} {line['wall_s']:7.3f} {spread:>15} "
            f"{line['cpu_s_per_gb']:9.3f} {ratios[0]:>6} {ratios[1]:>12} {ratios[2]:>7}",
        )


def main() -> int:
    """Parse the options, measure, and write the record."""
    parser = argparse.ArgumentParser(prog="checkpointbench", description=__doc__)
    parser.add_argument("--models", default=",".join(STATES), help=f"some of {', '.join(STATES)} (default: all)")
    command.add_options(parser, rounds=5)
    arguments = parser.parse_args()
    return command.run_in_scratch(arguments.scratch, "checkpoints", lambda scratch: run(arguments, scratch))


def run(arguments: argparse.Namespace, scratch: Path) -> Path:
    """Measure all models, and write the record. Returns its path."""
    results = Results()
    with hugepages.reserved(128 << 20), idle_disk(scratch) as disk:
        place = Place(scratch, arguments.rounds, disk)
        for model in arguments.models.split(","):
            measure(model, STATES[model](), place, results)
            show([line for line in summary(results) if str(line["row"]).endswith(model)])
    fields = {
        "rounds": arguments.rounds,
        "summary": summary(results),
        "samples": {
            row: {name: [one.to_json() for one in samples] for name, samples in by_name.items()}
            for row, by_name in results.samples.items()
        },
        "left_out": results.left_out,
    }
    path = command.write_record(arguments.results, "checkpoints", scratch, fields)
    for key, reason in results.left_out.items():
        print(f"left out: {key}: {reason}")
    return path


if __name__ == "__main__":
    sys.exit(main())
