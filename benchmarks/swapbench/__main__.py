"""``python -m swapbench``: borrow, change and write back each tensor of a state, in turn with fio."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import deepnvme
import torch

from common import command, hugepages
from common.disk_idle import idle_disk
from swapbench.fio_mixed import HUGE_BYTES, best_of_fio

if TYPE_CHECKING:
    from pathlib import Path

_WANTED = 0.9


def step(swapper: deepnvme.Swapper, keys: list[str]) -> dict[str, float]:
    """Borrow, change and write back every tensor once, to the last byte on disk."""
    before, usage = swapper.stats(), resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    for key in keys:
        with swapper.borrow(key) as borrowed:
            borrowed.add_(1)
    swapper.flush()
    took_s = time.perf_counter() - start
    after, used = swapper.stats(), resource.getrusage(resource.RUSAGE_SELF)
    read, written = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
    cpu_s = used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime
    return {
        "bytes_per_s": (read + written) / took_s,
        "took_s": took_s,
        "read": read,
        "written": written,
        "stalled_s": after.stalled_s - before.stalled_s,
        "cpu_s_per_gb": cpu_s / ((read + written) / 1e9),
    }


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="swapbench", description=__doc__)
    command.add_options(parser, rounds=5)
    parser.add_argument("--mib", type=int, default=4096, help="size of the state in MiB")
    parser.add_argument("--item-mib", type=int, default=64)
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument("--prefetch-mib", type=int, default=None)
    parser.add_argument("--headroom-mib", type=int, default=None)
    parser.add_argument("--checksums", action="store_true")
    return parser.parse_args()


def open_swapper(chosen: argparse.Namespace, scratch: Path) -> deepnvme.Swapper:
    """Make the swapper that is measured."""
    mib = {"prefetch_bytes": chosen.prefetch_mib, "headroom_bytes": chosen.headroom_mib}
    bounds = {name: None if value is None else value << 20 for name, value in mib.items()}
    return deepnvme.Swapper(scratch, memory=chosen.memory_mib << 20, checksums=chosen.checksums, **bounds)


def state(chosen: argparse.Namespace, key: str) -> torch.Tensor:
    """Return the tensor of a key: random bytes, which no disk can compress."""
    generator = torch.Generator().manual_seed(int(key))
    return torch.randint(-(1 << 31), 1 << 31, (chosen.item_mib << 18,), dtype=torch.int32, generator=generator)


def alternate(chosen: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Run all rounds, the first of which does not count."""
    nbytes = chosen.mib << 20
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    with (
        hugepages.reserved(HUGE_BYTES) as is_huge,
        idle_disk(scratch) as disk,
        open_swapper(chosen, scratch) as swapper,
    ):
        keys = [str(index) for index in range(chosen.mib // chosen.item_mib)]
        for key in keys:
            swapper.put(key, state(chosen, key))
        swapper.flush()
        swapper.schedule(keys)
        best, trials = best_of_fio(scratch / "mixed", nbytes, disk, is_huge=is_huge)
        for index in range(chosen.rounds + 1):
            for turn in ("deepnvme", "fio") if index % 2 else ("fio", "deepnvme"):
                disk.wait()
                if turn == "fio":
                    theirs.append(speed := best.run(scratch / "mixed", nbytes))
                else:
                    ours.append(step(swapper, keys))
                    speed = ours[-1]["bytes_per_s"]
                note = "" if index else " (not counted)"
                print(f"round {index} {turn}: {speed / 1e9:.2f} GB/s{note}", file=sys.stderr, flush=True)
        for key in keys:
            with swapper.borrow(key, shared=True) as borrowed:
                if not torch.equal(borrowed, state(chosen, key).add_(chosen.rounds + 1)):
                    raise RuntimeError(f"{key} is not what it was made")
    return {"fio": trials, "best": str(best), "ours": ours[1:], "theirs": theirs[1:]}


def report(measured: dict[str, Any]) -> float:
    """Print the results. Returns the ratio."""
    ours, theirs = measured["ours"], measured["theirs"]
    ratios = [one["bytes_per_s"] / other for one, other in zip(ours, theirs, strict=True)]
    for name, speeds in (("deepnvme", [one["bytes_per_s"] for one in ours]), (measured["best"], theirs)):
        print(f"{name}: {median(speeds) / 1e9:.2f} GB/s ({min(speeds) / 1e9:.2f} to {max(speeds) / 1e9:.2f})")
    cpu_s = median(one["cpu_s_per_gb"] for one in ours)
    stalled = median(one["stalled_s"] / one["took_s"] for one in ours)
    print(f"{cpu_s:.3f} CPU s/GB with the additions; {stalled:.0%} of the time waited for a tensor")
    met = "met" if median(ratios) >= _WANTED else "MISSED"
    print(f"{met}: {median(ratios):.2f} of fio ({min(ratios):.2f} to {max(ratios):.2f}; wanted {_WANTED})")
    return float(median(ratios))


def main() -> int:
    """Parse the options, measure, and write the record."""
    chosen = arguments()
    if shutil.which("fio") is None:
        print("skipped: fio is not installed, and there is nothing to compare with")
        return 0
    settings = {key: str(value) for key, value in vars(chosen).items() if key not in {"scratch", "results"}}
    with command.scratch_folder(chosen.scratch, "swap") as scratch:
        measured = alternate(chosen, scratch)
        fields = {
            "load": os.getloadavg()[0],
            "settings": settings,
            **measured,
            "ratio": report(measured),
        }
        path = command.write_record(chosen.results, "swap", scratch, fields)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
