"""``python -m storagebench.grid FOLDER``: compare the choice of ``deepnvme tune`` with the best of a full grid.

The grid tries every setting of the search's space, `--rounds` times each in changing order. The best setting by
median and the choice of ``tune`` are then measured in alternating rounds, since the best of a thousand noisy
medians is partly luck.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import deepnvme

from common import cache

_FINAL_ROUNDS = 15


def main() -> None:
    """Search, try the grid, compare."""
    parser = argparse.ArgumentParser(prog="storagebench.grid", description=__doc__)
    parser.add_argument("folder", type=Path, help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=400, help="size of a trial (default 400)")
    parser.add_argument("--rounds", type=int, default=2, help="trials of each setting of the grid (default 2)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for direction in ("read", "write"):
            compare(direction, Path(folder), arguments.mib << 20, arguments.rounds)


def compare(direction: str, folder: Path, size: int, rounds: int) -> None:
    """Print the comparison for one direction."""
    trial = Trial(direction, folder / "grid.raw", size)
    began = time.monotonic()
    speeds: dict[int, list[float]] = {}
    settings = grid()
    for _ in range(rounds):
        for index in random.sample(range(len(settings)), len(settings)):
            speeds.setdefault(index, []).append(trial.run(settings[index]))
    grid_s = time.monotonic() - began
    best = settings[max(speeds, key=lambda index: median(speeds[index]))]
    found = deepnvme.tune(
        folder,
        budget=round(grid_s / 5),
        size=size,
        read=direction == "read",
        write=direction == "write",
        output=folder / "deepnvme.toml",
    )
    chosen = found["results"][0][direction]["config"]
    ratios = []
    for number in range(_FINAL_ROUNDS):
        order = (chosen, best) if number % 2 else (best, chosen)
        speed = {id(one): trial.run(one) for one in order}
        ratios.append(speed[id(chosen)] / speed[id(best)])
    seconds = f"{grid_s:.0f} s; tune {found['seconds']:.0f} s"
    print(f"{direction}: grid of {len(settings)}, {rounds} trials each, {seconds}")
    print(f"  best of the grid  {best}")
    print(f"  choice of tune    {chosen}")
    spread = f"({min(ratios):.3f}-{max(ratios):.3f})"
    print(f"  tune / grid: {median(ratios):.3f}, median of {_FINAL_ROUNDS} rounds {spread}")


def grid() -> list[dict[str, Any]]:
    """Return every combination of the space that ``tune`` searches here for pinned memory."""
    with tempfile.TemporaryDirectory() as folder:
        found = deepnvme.tune(folder, budget=1, size="1M", write=False, output=Path(folder) / "deepnvme.toml")
    space: dict[str, list[Any]] = found["space"]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


class Trial:
    """One transfer of one file with given settings."""

    def __init__(self, direction: str, path: Path, size: int) -> None:
        self._direction, self._path, self._size = direction, path, size
        self._tensor = deepnvme.pinned_empty(size)
        self._tensor.random_(0, 255)
        deepnvme.write(self._tensor, path, durability="full")

    def run(self, setting: dict[str, Any]) -> float:
        """Return GB/s: a cold read, or a write in place."""
        names = ("block_bytes", "queue_depth", "workers", "submit", "window", "backend", "register_pool")
        with deepnvme.Engine(**{name: setting[name] for name in names}) as engine:
            cache.make_cold(self._path)
            began = time.perf_counter()
            if self._direction == "read":
                engine.read(self._tensor, self._path)
            else:
                engine.write(self._tensor, self._path, offset=0)
            return self._size / (time.perf_counter() - began) / 1e9


if __name__ == "__main__":
    main()
