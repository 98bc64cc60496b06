"""Loads of 10,000 small tensors: CPU time, requests and operations of each.

    python -m checkpointbench.small [--folder scratch] [--rounds 5]

The file is read once first, so that it is in the page cache. CPU time is that of the whole process, as the
median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import deepnvme
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 10_000


def ways(path: Path, into: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return the loads to measure."""

    def lazily() -> None:
        for tensor in deepnvme.load(path, lazy=True).values():
            tensor + 0

    return {
        "into": lambda: deepnvme.load(path, into=into),
        "new memory": lambda: deepnvme.load(path),
        "lazy, in order": lazily,
    }


def main() -> None:
    """Print a line for each file and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("scratch"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1024, 16384, (COUNT,), generator=generator)
    state = {f"layers.{i}.weight": torch.randn(int(size), generator=generator) for i, size in enumerate(sizes)}
    for suffix in (".safetensors", ".pt"):
        path = arguments.folder / f"small{suffix}"
        deepnvme.save(state, path)
        path.read_bytes()
        into = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        for name, load in ways(path, into).items():
            load()
            before, seconds = deepnvme.stats(), []
            for _ in range(arguments.rounds):
                began = time.process_time()
                load()
                seconds.append(time.process_time() - began)
            after = deepnvme.stats()
            requests, ops = (
                (getattr(after, of) - getattr(before, of)) // arguments.rounds for of in ("requests", "ops")
            )
            median = statistics.median(seconds)
            print(
                f"{suffix:13} {name:15} {median:.3f} s of CPU ({min(seconds):.3f} to {max(seconds):.3f}), "
                f"{requests} requests, {ops} operations"
            )
        path.unlink()


if __name__ == "__main__":
    main()
