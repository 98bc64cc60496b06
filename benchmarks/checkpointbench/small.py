"""Loads of 10,000 small tensors: CPU time, requests and operations of each.

    python -m checkpointbench.small [--scratch scratch] [--rounds 5]

The file is read once first, so that it is in the page cache. CPU time is that of the whole process, as the
median of the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

import deepnvme
import torch

from checkpointbench.arguments import run
from checkpointbench.states import small_10k

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def ways(path: Path, into: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return the loads to measure."""

    def lazily() -> None:
        for tensor in deepnvme.load(path, lazy=True).values():
            tensor.materialize()

    return {
        "into": lambda: deepnvme.load(path, into=into),
        "new memory": lambda: deepnvme.load(path),
        "lazy, in order": lazily,
    }


def main() -> int:
    """Parse the options, measure, and print a line for each file and load."""
    return run("small", __doc__, measure, rounds=5)


def measure(rounds: int, scratch: Path) -> None:
    """Print a line for each file and load."""
    state = small_10k()
    for suffix in (".safetensors", ".pt"):
        path = scratch / f"small{suffix}"
        deepnvme.save(state, path)
        path.read_bytes()
        into = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        for name, load in ways(path, into).items():
            load()
            before, seconds = deepnvme.stats(), []
            for _ in range(rounds):
                began = time.process_time()
                load()
                seconds.append(time.process_time() - began)
            after = deepnvme.stats()
            requests, ops = ((getattr(after, of) - getattr(before, of)) // rounds for of in ("requests", "ops"))
            median = statistics.median(seconds)
            print(
                f"{suffix:13} {name:15} {median:.3f} s of CPU ({min(seconds):.3f} to {max(seconds):.3f}), "
                f"{requests} requests, {ops} operations"
            )
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
