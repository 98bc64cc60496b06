"""``python -m zerobench``: do the same training run on both ops, step by step in turn."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import command
from common.child import Child
from common.disk_idle import idle_disk
from common.round_order import order
from zerobench.child import AIO, CONTEXT, LAYERS, ROWS, WIDTH, WORDS

OPS = ("deepnvme", "DeepSpeed")
# The first steps make files, moments and the order in which parameters are fetched.
_UNCOUNTED = 2


def measure(row: str, rounds: int, scratch: Path) -> dict[str, list[dict[str, float]]]:
    """Return the counted steps of each op. Their losses are equal to the last bit.

    Raises:
        RuntimeError: the losses differ, or one of the processes ended.
    """
    steps: dict[str, list[dict[str, float]]] = {op: [] for op in OPS}
    children: dict[str, Child] = {}
    with idle_disk(scratch) as disk:
        try:
            for op in OPS:
                folder = scratch / op
                folder.mkdir()
                children[op] = Child("zerobench.child", op, row, str(folder), log=scratch / f"{op}.log")
            for index in range(rounds + _UNCOUNTED):
                losses = set()
                for op in order(OPS, index):
                    disk.wait()
                    answer = children[op].ask({})
                    losses.add(answer["loss"])
                    if index >= _UNCOUNTED:
                        steps[op].append(answer)
                    print(f"{row:20} {op:10} {answer}", file=sys.stderr, flush=True)
                if len(losses) != 1:
                    raise RuntimeError(f"the losses of step {index} differ: {losses}")
        finally:
            for child in children.values():
                child.kill()
    return steps


def summed(steps: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians, spread, and the median of the ratios within the rounds."""
    pairs = list(zip(steps["DeepSpeed"], steps["deepnvme"], strict=True))
    return {
        **{
            op: {
                **{key: median(one[key] for one in found) for key in found[0] if key != "loss"},
                "min_s": min(one["step_s"] for one in found),
                "max_s": max(one["step_s"] for one in found),
            }
            for op, found in steps.items()
        },
        "times": {
            key: median(theirs[key] / ours[key] for theirs, ours in pairs)
            for key in ("step_s", "passes_s", "cpu_s")
        },
    }


def table(row: str, found: dict[str, Any]) -> str:
    """Draw it for people."""
    lines = [
        f"\n{row:20} {'step s':>7} {'min - max':>15} {'passes s':>9} {'CPU s':>7} {'GB read':>8} {'GB written':>10}"
    ]
    for op in OPS:
        one = found[op]
        spread = f"{one['min_s']:.3f} - {one['max_s']:.3f}"
        lines.append(
            f"{op:20} {one['step_s']:7.3f} {spread:>15} {one['passes_s']:9.3f} {one['cpu_s']:7.2f} "
            f"{one['read_bytes'] / 1e9:8.2f} {one['write_bytes'] / 1e9:10.2f}",
        )
    times = found["times"]
    lines.append(
        f"ours is {times['step_s']:.2f} times as fast (passes {times['passes_s']:.2f}), "
        f"with {times['cpu_s']:.2f} of our CPU time in theirs"
    )
    return "\n".join(lines)


def run(arguments: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Measure all rows, and write the record after each."""
    rows, loads = [], [os.getloadavg()[0]]
    for key in arguments.rows.split(","):
        folder = scratch / key
        folder.mkdir(parents=True)
        steps = measure(key, arguments.rounds, folder)
        shutil.rmtree(folder)
        rows.append({"key": key, **summed(steps), "samples": steps})
        loads.append(os.getloadavg()[0])
        print(table(key, rows[-1]), flush=True)
        fields = {
            "model": {"width": WIDTH, "layers": LAYERS, "words": WORDS, "context": CONTEXT},
            "aio": AIO,
            "load": loads,
            "rows": rows,
        }
        command.write_record(arguments.results, "zero", scratch, fields)
    return rows


def main() -> int:
    """Parse the options, measure, and write the record."""
    parser = argparse.ArgumentParser(prog="zerobench", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of {', '.join(ROWS)} (default: all)")
    command.add_options(parser, rounds=7)
    arguments = parser.parse_args()
    with command.scratch_folder(arguments.scratch, "zero") as scratch:
        rows = run(arguments, scratch)
    for one in rows:
        faster = one["times"]["step_s"]
        print(
            f"{'met' if faster > 1 else 'MISSED':7} {one['key']}: "
            f"{faster:.2f} times DeepSpeed's own op (wanted: more than 1)",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
