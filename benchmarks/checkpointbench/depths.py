"""``python -m checkpointbench.depths``: cold loads of one large tensor at several queue depths, in turns.

Each load runs in a new child process, into fresh memory. The runai streamer, which submits all requests at once, is
one of the tools.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import deepnvme
import torch

from checkpointbench.arguments import run
from checkpointbench.states import STATES
from checkpointbench.workers import Job, Workers
from common import cache
from common.round_order import order

_DEPTHS = (16, 32, 64, 128, 256)
_OURS = "deepnvme .safetensors"
_BASELINE = "runai streamer"


def main() -> int:
    """Parse the options, measure, and print a table."""
    return run("depths", __doc__, measure, rounds=9)


def measure(rounds: int, scratch: Path) -> None:
    """Measure, and print medians and the medians of the ratios to the first depth."""
    path, small = scratch / "depths.safetensors", scratch / "small.safetensors"
    deepnvme.save(STATES["one-2g"](), path, progress=False)
    deepnvme.save({"a": torch.arange(1000)}, small, progress=False)
    size = path.stat().st_size
    names = [*(f"depth {depth}" for depth in _DEPTHS), _BASELINE]
    jobs = {_BASELINE: Job(_BASELINE, str(path), str(small), size)}
    settings = {depth: scratch / f"depth-{depth}.toml" for depth in _DEPTHS}
    for depth, file in settings.items():
        file.write_text(f"[engine]\nqueue_depth = {depth}\n", encoding="utf-8")
        environment = {"DEEPNVME_CONFIG": str(file)}
        jobs[f"depth {depth}"] = Job(_OURS, str(path), str(small), size, environment=environment)
    taken_s: dict[str, list[float]] = {name: [] for name in names}
    workers = Workers()
    try:
        for index in range(rounds):
            for name in order(names, index):
                cache.make_cold(path)
                taken_s[name].append(workers.load(jobs[name]).wall_s)
    finally:
        workers.close()
    for name, all_s in taken_s.items():
        ratio = median(one / first for one, first in zip(all_s, taken_s[names[0]], strict=True))
        print(f"{name:15} {median(all_s):.3f} s ({min(all_s):.3f} to {max(all_s):.3f}), {ratio:.2f} of the first")


if __name__ == "__main__":
    sys.exit(main())
