"""``python -m gpubench.gathers``: gathers of rows into GPU tensors, and loads of a cached file, on the first GPU.

Prints medians: ``RowStore.gather`` into a GPU tensor, compared with a gather into pinned memory and `copy_`, with
the whole table in memory and with a sixteenth of it; the time to make pinned memory; and loads of a file in the
page cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import deepnvme
import torch

from common import command

_ROWS, _COLUMNS = 200_000, 2560
_COUNTS = (16, 256, 4096, 16_384)
_GATHERS, _LOADS = 9, 5
_CACHED_BYTES = 1 << 30


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the median time of a call, until the GPU is idle."""
    took = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def gathers(folder: Path) -> None:
    """Gather random rows in both ways."""
    path = folder / "table.safetensors"
    table = torch.empty(_ROWS, _COLUMNS, dtype=torch.bfloat16).uniform_(-1, 1)
    deepnvme.save({"table": table}, path, progress=False)
    for name, memory in (("all in memory", table.nbytes * 5 // 4), ("a sixteenth in memory", table.nbytes // 16)):
        with deepnvme.RowStore(path, "table", memory=memory) as store:
            if memory > table.nbytes:
                for ids in torch.split(torch.arange(_ROWS), 4096):
                    store.gather(ids)
            for count in _COUNTS:
                on_gpu = torch.empty(count, _COLUMNS, dtype=torch.bfloat16, device="cuda")
                pinned = torch.empty(count, _COLUMNS, dtype=torch.bfloat16, pin_memory=True)

                def direct(store: deepnvme.RowStore = store, on_gpu: torch.Tensor = on_gpu) -> None:
                    store.gather(torch.randint(0, _ROWS, on_gpu.shape[:1]), out=on_gpu)

                def copied(
                    store: deepnvme.RowStore = store, on_gpu: torch.Tensor = on_gpu, pinned: torch.Tensor = pinned
                ) -> None:
                    store.gather(torch.randint(0, _ROWS, on_gpu.shape[:1]), out=pinned)
                    on_gpu.copy_(pinned, non_blocking=True)

                ours, theirs = (seconds(work, _GATHERS) * 1e6 for work in (direct, copied))
                print(
                    f"{count} rows, {name}: {ours:.0f} us; into pinned memory and copy_ {theirs:.0f} us", flush=True
                )


def pinned() -> None:
    """Make pinned memory."""
    for gib in (1, 4):
        makes: dict[str, Callable[[], object]] = {
            "pinned_empty": partial(deepnvme.pinned_empty, gib << 30),
            "torch": partial(torch.empty, gib << 30, dtype=torch.uint8, pin_memory=True),
        }
        for name, make in makes.items():
            print(f"{gib} GiB of pinned memory, {name}: {seconds(make, 1):.2f} s", flush=True)


def cached(folder: Path) -> None:
    """Load a file that is in the page cache."""
    from safetensors.torch import load_file  # noqa: PLC0415

    path = folder / "cached.safetensors"
    for each in (16 << 20, 256 << 10):
        state = {f"t{n}": torch.randint(0, 256, (each,), dtype=torch.uint8) for n in range(_CACHED_BYTES // each)}
        deepnvme.save(state, path, progress=False)
        path.read_bytes()
        into = {name: torch.empty_like(tensor, device="cuda") for name, tensor in state.items()}
        loads: dict[str, Callable[[], object]] = {
            "deepnvme, new GPU tensors": lambda: deepnvme.load(path, device="cuda", progress=False),
            "deepnvme, existing GPU tensors": partial(deepnvme.load, path, into=into, progress=False),
            "safetensors": lambda: load_file(path, device="cuda"),
        }
        for name, load in loads.items():
            load()
            speed = _CACHED_BYTES / seconds(load, _LOADS) / 1e9
            print(f"cached file, tensors of {each >> 10} KiB, {name}: {speed:.1f} GB/s", flush=True)


def main() -> None:
    """Print all."""
    parser = argparse.ArgumentParser(prog="gpubench.gathers", description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path("scratch"), help="folder on the disk to measure")
    with command.scratch_folder(parser.parse_args().scratch, "gathers") as folder:
        gathers(folder)
        pinned()
        cached(folder)


if __name__ == "__main__":
    main()
