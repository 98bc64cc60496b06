"""Loads of files that are in the page cache, compared with safetensors.

    python -m checkpointbench.cached [--scratch scratch] [--rounds 7] [--mib 512]

GB/s and seconds of CPU for each GB, medians of alternating rounds. Every load ends with all bytes in the tensors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import deepnvme
import safetensors.torch
import torch

from common import command
from common.round_order import order

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TENSOR_KIB = (16 << 10, 256)


def loads(path: Path, into: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return the loads to measure."""
    direct = deepnvme.Engine(direct="required")

    def copied() -> None:
        for name, tensor in safetensors.torch.load_file(path).items():
            into[name].copy_(tensor)

    return {
        "into": lambda: deepnvme.load(path, into=into),
        'into, direct="required"': lambda: deepnvme.load(path, into=into, engine=direct),
        "into, safetensors and copy_": copied,
        "new memory": lambda: deepnvme.load(path),
        "new memory, safetensors and clone": lambda: [
            tensor.clone() for tensor in safetensors.torch.load_file(path).values()
        ],
    }


def main() -> None:
    """Print a line for each size of tensors and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_rounds_and_scratch(parser, rounds=7)
    parser.add_argument("--mib", type=int, default=512)
    arguments = parser.parse_args()
    with command.scratch_folder(arguments.scratch, "cached") as scratch:
        measure(scratch / "cached.safetensors", arguments.mib, arguments.rounds)


def measure(path: Path, mib: int, rounds: int) -> None:
    """Print a line for each size of tensors and load of the file."""
    gb = mib * 2**20 / 1e9
    for kib in TENSOR_KIB:
        state = {str(index): torch.randn(kib << 8) for index in range(mib * 1024 // kib)}
        deepnvme.save(state, path)
        path.read_bytes()
        measured = loads(path, state)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in measured}
        # The first round, with the first request of each engine, is not counted.
        for index in range(rounds + 1):
            for name in order(list(measured), index):
                began, cpu = time.perf_counter(), time.process_time()
                measured[name]()
                if index > 0:
                    times[name].append((time.perf_counter() - began, time.process_time() - cpu))
        for name, spent in times.items():
            rate = gb / statistics.median(seconds for seconds, _ in spent)
            cost = statistics.median(cpu for _, cpu in spent) / gb
            print(f"tensors of {kib} KiB, {name}: {rate:.2f} GB/s, {cost:.2f} CPU s/GB")


if __name__ == "__main__":
    main()
