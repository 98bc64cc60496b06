"""``python -m optimbench``: measure optimizer steps in memory, in alternating rounds."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from common import command
from common.not_offered import NotOffered
from common.round_order import order
from optimbench.tools import OURS, Row, Tensors, rows


@dataclass
class Samples:
    """Wall-clock and CPU seconds, one for each counted round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def measure(row: Row, elements: int, threads: int, rounds: int, steps: int) -> dict[str, object]:
    """Run a row: each round with tensors of its own, which all tools step on, one after the other."""
    left_out: dict[str, str] = {}
    samples = {one.name: Samples() for one in row.tools}
    weights, grad = (torch.randn(elements, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    for index in range(rounds):
        # Another place in memory each time.
        padding = torch.empty(1_000_003 * (index + 1)).zero_()
        tensors = Tensors(weights, grad)
        for position in order(list(range(len(row.tools))), index):
            one = row.tools[position]
            if one.name in left_out:
                continue
            try:
                step = one.make(tensors, threads)
            except NotOffered as error:
                left_out[one.name] = str(error)
                samples.pop(one.name)
                continue
            step()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            samples[one.name].wall_s.append((time.perf_counter() - wall) / steps)
            samples[one.name].cpu_s.append((time.process_time() - cpu) / steps)
        del tensors, padding, step
        gc.collect()
    return {
        "row": row.name,
        "element_bytes": row.element_bytes,
        "left_out": left_out,
        "tools": [_result(name, one, samples[OURS], row.element_bytes * elements) for name, one in samples.items()],
    }


def _result(name: str, one: Samples, ours: Samples, nbytes: float) -> dict[str, object]:
    ratios = [other / mine for other, mine in zip(one.wall_s, ours.wall_s, strict=True)]
    return {
        "name": name,
        "step_ms": [round(value * 1e3, 3) for value in one.wall_s],
        "median_ms": round(median(one.wall_s) * 1e3, 2),
        "min_ms": round(min(one.wall_s) * 1e3, 2),
        "max_ms": round(max(one.wall_s) * 1e3, 2),
        "gb_per_s": round(nbytes / median(one.wall_s) / 1e9, 2),
        "cpu_s_per_gb": round(median(one.cpu_s) / (nbytes / 1e9), 4),
        "speedup_of_ours": round(median(ratios), 3),
    }


def main() -> int:
    """Measure the rows, and write the record."""
    parser = argparse.ArgumentParser(prog="optimbench", description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="consecutive steps per turn")
    parser.add_argument("--rows", default="", help="names of rows, separated by semicolons (default: all)")
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = [row for row in rows() if not arguments.rows or row.name in arguments.rows.split(";")]
    loads = [os.getloadavg()[0]]
    done: list[dict[str, object]] = []
    for row in chosen:
        done.append(measure(row, arguments.elements, arguments.threads, arguments.rounds, arguments.steps))
        loads.append(os.getloadavg()[0])
        print(_table(done[-1]), flush=True)
    fields = {
        "elements": arguments.elements,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "load": loads,
        "rows": done,
    }
    # All state is in memory: the record describes the disk of the current folder, which has no part in it.
    path = command.write_record(arguments.results, "optim", Path(), fields)
    print(path, file=sys.stderr)
    return 0


def _table(row: dict[str, object]) -> str:
    lines = [f"\n{row['row']}, {row['element_bytes']} bytes of memory for each element"]
    lines.append("| | step ms | min - max | GB/s | CPU s/GB | speedup of ours |")
    lines.append("|---|---|---|---|---|---|")
    tools = cast("list[dict[str, Any]]", row["tools"])
    for one in sorted(tools, key=lambda one: one["median_ms"]):
        spread = f"{one['min_ms']} - {one['max_ms']}"
        ratio = "" if one["name"] == OURS else one["speedup_of_ours"]
        cells = [one["name"], one["median_ms"], spread, one["gb_per_s"], one["cpu_s_per_gb"], ratio]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    left_out = cast("dict[str, str]", row["left_out"])
    lines += [f"left out: {name}: {reason.splitlines()[0]}" for name, reason in left_out.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
