"""``python -m optimbench.small``: measure steps of thousands of small parameters, in alternating rounds."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import command
from common.round_order import order

_ELEMENTS = (256, 4096)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Samples:
    """Microseconds for each parameter and step: on the clock, and of CPUs."""

    wall_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


def parameters(count: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Make parameters of random lengths, with gradients."""
    values = torch.Generator().manual_seed(1)
    lowest, highest = _ELEMENTS
    made = []
    for length in torch.randint(lowest, highest + 1, (count,), generator=values).tolist():
        param = torch.nn.Parameter(torch.randn(length, generator=values).to(dtype))
        param.grad = torch.randn(length, generator=values).to(dtype)
        made.append(param)
    return made


def tools(scratch: str, memory: str, threads: int) -> dict[str, Make]:
    """Return the function that makes each optimizer."""
    from deepnvme import optim  # noqa: PLC0415

    ours: dict[str, Any] = {"threads": threads}
    disk: dict[str, Any] = {**ours, "swap_dir": scratch, "memory": memory}
    return {
        "deepnvme": lambda params: optim.AdamW(params, **ours),
        "deepnvme, fused": lambda params: optim.AdamW(params, **ours, fused=True),
        "deepnvme, state on disk": lambda params: optim.AdamW(params, **disk),
        "deepnvme, state on disk, checksums": lambda params: optim.AdamW(params, **disk, checksums=True),
        "torch, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
        "torch, for-loop": lambda params: torch.optim.AdamW(params, foreach=False),
        "torch, fused": lambda params: torch.optim.AdamW(params, fused=True),
    }


def measure(makers: dict[str, Make], count: int, dtype: torch.dtype, rounds: int, steps: int) -> dict[str, Samples]:
    """Run all tools in turns. Each has tensors of its own."""
    optimizers = {name: make(parameters(count, dtype)) for name, make in makers.items()}
    for optimizer in optimizers.values():
        # The first step makes the state, and the second the plan for it.
        optimizer.step()
        optimizer.step()
    samples = {name: Samples() for name in makers}
    gc.collect()
    for index in range(rounds):
        for name in order(list(makers), index):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                optimizers[name].step()
            samples[name].wall_us.append((time.perf_counter() - wall) / steps / count * 1e6)
            samples[name].cpu_us.append((time.process_time() - cpu) / steps / count * 1e6)
    for optimizer in optimizers.values():
        getattr(optimizer, "close", lambda: None)()
    return samples


def _lines(samples: dict[str, Samples]) -> list[dict[str, object]]:
    return [
        {
            "name": name,
            "wall_us": round(median(one.wall_us), 2),
            "wall_us_min": round(min(one.wall_us), 2),
            "wall_us_max": round(max(one.wall_us), 2),
            "cpu_us": round(median(one.cpu_us), 2),
            "cpu_us_min": round(min(one.cpu_us), 2),
            "cpu_us_max": round(max(one.cpu_us), 2),
        }
        for name, one in samples.items()
    ]


def _table(title: str, lines: list[dict[str, object]]) -> str:
    rows = [
        f"\n{title}",
        "| | wall us a parameter | min - max | CPU us a parameter | min - max |",
        "|---|---|---|---|---|",
    ]
    for one in lines:
        wall, cpu = f"{one['wall_us_min']} - {one['wall_us_max']}", f"{one['cpu_us_min']} - {one['cpu_us_max']}"
        rows.append(f"| {one['name']} | {one['wall_us']} | {wall} | {one['cpu_us']} | {cpu} |")
    return "\n".join(rows)


def main() -> int:
    """Measure each number of parameters and dtype, and write the record."""
    parser = argparse.ArgumentParser(prog="optimbench.small", description=__doc__)
    parser.add_argument("--counts", default="1000,10000", help="numbers of parameters")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="consecutive steps per turn")
    parser.add_argument("--memory", default="64MB", help="memory for state on disk")
    parser.add_argument("--only", default="", help="names of tools, separated by semicolons (default: all)")
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    loads, rows = [os.getloadavg()[0]], []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        makers = tools(folder, arguments.memory, arguments.threads)
        if arguments.only:
            makers = {name: makers[name] for name in arguments.only.split(";")}
        for count in map(int, arguments.counts.split(",")):
            for dtype in arguments.dtypes.split(","):
                samples = measure(makers, count, _DTYPES[dtype], arguments.rounds, arguments.steps)
                lines = _lines(samples)
                rows.append({"parameters": count, "dtype": dtype, "tools": lines})
                loads.append(os.getloadavg()[0])
                print(
                    _table(f"{count} parameters of {_ELEMENTS[0]} to {_ELEMENTS[1]} elements, {dtype}", lines),
                    flush=True,
                )
    fields = {
        "elements": _ELEMENTS,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "memory": arguments.memory,
        "load": loads,
        "rows": rows,
    }
    print(command.write_record(arguments.results, "optim-small", arguments.scratch, fields), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
