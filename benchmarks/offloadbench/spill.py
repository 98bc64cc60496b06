"""``python -m offloadbench.spill``: a model and its optimizer to disk and back, in turn with fio."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from statistics import median

import deepnvme
import torch

from common import command
from common.cache import drop
from common.disk_idle import idle_disk
from common.limit import DiskLimit

_WIDTH, _LAYERS = 2048, 32
_WANTED = 0.95
_GB = 1e9
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES


def cpu_s() -> float:
    """Return the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def once(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, float]:
    """Spill and restore once."""
    resident, cpu = resident_bytes(), cpu_s()
    start = time.perf_counter()
    spilled = deepnvme.spill(model, optimizer, swap_dir=folder)
    spilled_s = time.perf_counter() - start
    freed, middle = resident - resident_bytes(), cpu_s()
    start = time.perf_counter()
    spilled.restore()
    restored_s = time.perf_counter() - start
    return {
        "write": spilled.nbytes / spilled_s / _GB,
        "read": spilled.nbytes / restored_s / _GB,
        "write_cpu_s": middle - cpu,
        "read_cpu_s": cpu_s() - middle,
        "freed_bytes": freed,
        "nbytes": spilled.nbytes,
    }


def main() -> int:
    """Parse the options, measure, and write the record."""
    parser = argparse.ArgumentParser(prog="offloadbench.spill", description=__doc__)
    command.add_options(parser, rounds=7)
    arguments = parser.parse_args()
    model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, _WIDTH)).square().mean().backward()
    optimizer.step()
    before = [one.detach().clone() for one in model.parameters()]
    loads, rounds = [os.getloadavg()[0]], []
    with command.scratch_folder(arguments.scratch, "spill") as scratch, idle_disk(scratch) as disk:
        path = scratch / "fio"
        # The first makes the file's blocks, and the state that later ones repeat.
        size = int(once(model, optimizer, scratch)["nbytes"])
        limit = DiskLimit.measure(path, size, huge=False)
        for index in range(arguments.rounds):
            found: dict[str, float] = {}
            for tool in ("fio", "ours") if index % 2 else ("ours", "fio"):
                disk.wait()
                if tool == "fio":
                    # Both write a new file.
                    path.unlink()
                    written = limit.write(path)
                    drop(path)
                    disk.wait()
                    found |= {"fio_write": written.gb_per_s, "fio_read": limit.read(path).gb_per_s}
                else:
                    found |= once(model, optimizer, scratch)
            rounds.append(found)
            print(found, file=sys.stderr, flush=True)
        for one, other in zip(model.parameters(), before, strict=True):
            if not torch.equal(one, other):
                raise RuntimeError("a weight has changed")
        loads.append(os.getloadavg()[0])
        rows = {
            direction: {
                "gb_per_s": median(one[direction] for one in rounds),
                "fio_gb_per_s": median(one[f"fio_{direction}"] for one in rounds),
                "of_fio": median(one[direction] / one[f"fio_{direction}"] for one in rounds),
                "of_fio_min": min(one[direction] / one[f"fio_{direction}"] for one in rounds),
                "of_fio_max": max(one[direction] / one[f"fio_{direction}"] for one in rounds),
                "cpu_s_per_gb": median(one[f"{direction}_cpu_s"] for one in rounds) / size * _GB,
            }
            for direction in ("write", "read")
        }
        freed = min(one["freed_bytes"] for one in rounds) / size
        fields = {"nbytes": size, "load": loads, "fio": str(limit), "rows": rows, "freed": freed, "rounds": rounds}
        record = command.write_record(arguments.results, "spill", scratch, fields)
    print(f"{size / _GB:.2f} GB of weights, gradients and moments; at least {freed:.1%} of it freed")
    for direction, row in rows.items():
        name = "spill" if direction == "write" else "restore"
        spread = f"{row['of_fio_min']:.2f} to {row['of_fio_max']:.2f}, goal {_WANTED}"
        print(
            f"{name:8} {row['gb_per_s']:.2f} GB/s, {row['of_fio']:.2f} of fio ({spread}), "
            f"{row['cpu_s_per_gb']:.3f} CPU s/GB"
        )
    print(f"written: {record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
