"""``python -m offloadbench``: train one model with each tool, step by step in turn."""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median
from typing import TYPE_CHECKING

from common import command
from common.child import Child
from common.disk_idle import idle_disk
from common.round_order import order
from offloadbench.child import TOOLS
from zerobench.child import CONTEXT, LAYERS, WIDTH, WORDS

if TYPE_CHECKING:
    from pathlib import Path

# The first steps make files and moments, and learn the order.
_UNCOUNTED = 2
_GB = 1e9
# Weights of the model: its blocks, two tables of words, and places.
_WEIGHTS = 12 * WIDTH * WIDTH * LAYERS + 2 * WORDS * WIDTH + CONTEXT * WIDTH
# Weights, gradients and two moments in fp32.
_STATE_BYTES = 16 * _WEIGHTS


def measure(arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, list[dict[str, float]]], str]:
    """Return the counted steps of each tool, and the last plan. Ours and torch have the same losses, bit for bit.

    Raises:
        RuntimeError: the losses differ, or one of the processes ended.
    """
    tools = arguments.tools.split(",")
    steps: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    children: dict[str, Child] = {}
    logs: dict[str, Path] = {}
    with idle_disk(scratch) as disk:
        try:
            for index, tool in enumerate(tools):
                folder, logs[tool] = scratch / str(index), scratch / f"{index}.log"
                folder.mkdir()
                options = (tool, str(folder), arguments.memory, str(arguments.batch))
                children[tool] = Child("offloadbench.child", *options, log=logs[tool])
            for index in range(arguments.rounds + _UNCOUNTED):
                losses = {}
                for tool in order(tools, index):
                    disk.wait()
                    answer = children[tool].ask({})
                    losses[tool] = answer["loss"]
                    if index >= _UNCOUNTED:
                        steps[tool].append(answer)
                    print(f"{tool:22} {answer}", file=sys.stderr, flush=True)
                exact = {loss for tool, loss in losses.items() if not tool.startswith("DeepSpeed")}
                if len(exact) > 1 or max(losses.values()) - min(losses.values()) > 1e-2 * max(losses.values()):
                    raise RuntimeError(f"the losses of step {index} differ: {losses}")
            plan = logs["deepnvme"].read_text() if "deepnvme" in children else ""
        finally:
            for child in children.values():
                child.kill()
    return steps, plan[plan.rfind("memory for all parts") - 20 :].strip()


def summed(found: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, float]:
    """Return medians, spread, and the median of the ratios within the rounds."""
    keys = ("step_s", "cpu_s", "read_bytes", "write_bytes", "resident_bytes")
    return {
        **{key: median(one[key] for one in found) for key in keys},
        "min_s": min(one["step_s"] for one in found),
        "max_s": max(one["step_s"] for one in found),
        "peak_bytes": max(one["resident_bytes"] for one in found),
        "times": median(theirs["step_s"] / mine["step_s"] for theirs, mine in zip(found, ours, strict=True)),
    }


def main() -> int:
    """Parse the options, measure, and write the record."""
    parser = argparse.ArgumentParser(prog="offloadbench", description=__doc__)
    whole = [tool for tool in TOOLS if tool != "only activations"]
    parser.add_argument("--tools", default=",".join(whole), help=f"some of {', '.join(TOOLS)}")
    parser.add_argument("--name", default="offload", help="of the record")
    parser.add_argument("--memory", default="256MB", help="bound of deepnvme (default: 256MB)")
    parser.add_argument("--batch", type=int, default=8, help=f"sequences of {CONTEXT} words in a step (default: 8)")
    command.add_options(parser, rounds=7)
    arguments = parser.parse_args()
    loads = [os.getloadavg()[0]]
    with command.scratch_folder(arguments.scratch, "offload") as scratch:
        steps, plan = measure(arguments, scratch)
        loads.append(os.getloadavg()[0])
        ours = steps.get("deepnvme") or next(iter(steps.values()))
        rows = {tool: summed(found, ours) for tool, found in steps.items()}
        fields = {
            "model": {
                "weights": _WEIGHTS,
                "state_bytes": _STATE_BYTES,
                "batch": arguments.batch,
                "context": CONTEXT,
            },
            "memory": arguments.memory,
            "load": loads,
            "rows": rows,
            "plan": plan,
            "samples": steps,
        }
        path = command.write_record(arguments.results, arguments.name, scratch, fields)
    words, size = arguments.batch * CONTEXT, f"{_STATE_BYTES / _GB:.2f} GB with gradients and moments"
    print(f"{_WEIGHTS / 1e6:.0f} million weights, {size}, {words} tokens a step")
    heads = {"min - max": 15, "tokens/s": 9, "CPU s": 6, "GB read": 8, "written": 8, "peak GB": 8}
    print(f"{'':22} {'step s':>7} {' '.join(f'{name:>{width}}' for name, width in heads.items())}")
    for tool, one in rows.items():
        spread = f"{one['min_s']:.3f} - {one['max_s']:.3f}"
        print(
            f"{tool:22} {one['step_s']:7.3f} {spread:>15} {words / one['step_s']:9.0f} {one['cpu_s']:6.2f} "
            f"{one['read_bytes'] / _GB:8.2f} {one['write_bytes'] / _GB:8.2f} {one['peak_bytes'] / _GB:8.2f}"
            f"   {one['times']:.2f} times the duration of ours"
        )
    print(plan)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
