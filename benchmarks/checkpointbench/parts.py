"""``python -m checkpointbench.parts``: measure the parts of a save and a load separately.

Pickling and planning use ``small-10k``, with Python's pickler and the native one. Loads use ``bf16-300`` in a
process of their own: the first load and later ones. First touch of unused memory is measured at once, and after all
memory has been free for some seconds, when a virtual machine may have returned it to its host. A first load after
such a pause is measured with huge pages where they pay, and without.
"""

from __future__ import annotations

import ctypes
import gc
import io
import mmap
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import deepnvme
import torch
from deepnvme._checkpoint import pickler, save

from checkpointbench.arguments import run
from checkpointbench.states import bf16_300, small_10k
from common import cache

_TOUCH_BYTES = 1 << 30
_HUGE_BYTES = 2 << 20
_PAUSE_S = 3
_PR_SET_THP_DISABLE = 41
_SMALL_ONLY = "small pages only"


@dataclass
class Cost:
    """The cost of a piece of work."""

    wall_s: float
    system_s: float
    faults: int

    def __str__(self) -> str:
        return f"{self.wall_s:7.3f} s, system {self.system_s:6.3f} s, {self.faults:8,} minor faults"


def cost(work: Callable[[], object]) -> Cost:
    """Do some work and return its cost. The result of the work is released afterwards."""
    gc.collect()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    made = work()
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    del made
    return Cost(wall_s, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt)


def pickling(rounds: int) -> None:
    """Describe 10,000 tensors, none of whose bytes is looked at."""
    state = small_10k()
    ways: dict[str, Callable[[], object]] = {
        "Python's pickler": lambda: pickler.Pickler(io.BytesIO()).dump(state),
        "native": lambda: pickler.pickle_with_storages(state),
    }
    for name, way in ways.items():
        way()
        spent_ms = min(cost(way).wall_s for _ in range(rounds)) * 1e3
        print(f"pickling {len(state):,} tensors, {name:17} {spent_ms:7.1f} ms", flush=True)


def plans(folder: Path, rounds: int) -> None:
    """Plan files of 10,000 tensors, to the last byte; nothing is written."""
    state = small_10k()
    named = save.checked_tensors(state)
    pickle, storages = pickler.pickle_with_storages(state)
    options = save.SaveOptions()
    ways: dict[str, Callable[[], object]] = {
        "checking for safetensors": lambda: save.checked_tensors(state),
        "planning safetensors": lambda: save.plan_safetensors(folder / "a.safetensors", named, options),
        "planning an archive": lambda: save.plan_archive(pickle, storages, folder / "a.pt", options),
    }
    for name, way in ways.items():
        spent_ms = min(cost(way).wall_s for _ in range(rounds)) * 1e3
        print(f"{name:26} {len(state):,} tensors {spent_ms:7.1f} ms", flush=True)


def loads(path: Path, rounds: int, verify: str) -> None:
    """Load a cold file again and again in this process."""
    for index in range(rounds):
        cache.make_cold(path)
        spent = cost(lambda: deepnvme.load(path, verify=verify, progress=False))
        print(f"load {path.stat().st_size / 1e9:.2f} GB, verify={verify}, number {index + 1}: {spent}", flush=True)


def touches(rounds: int) -> None:
    """Write to fresh memory, of small pages and of huge ones."""
    for name, advice in (("small pages", mmap.MADV_NOHUGEPAGE), ("huge pages", mmap.MADV_HUGEPAGE)):
        for index in range(rounds):
            memory = mmap.mmap(-1, _TOUCH_BYTES + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(advice)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            flat = flat[-flat.data_ptr() % _HUGE_BYTES :][:_TOUCH_BYTES]
            first, again = cost(partial(flat.fill_, 1)), cost(partial(flat.fill_, 2))
            print(f"fill 1 GiB, {name:11}, number {index + 1}, first: {first}\n{'again:':>43} {again}", flush=True)
            del flat
            memory.close()


def touch_once(name: str, advice: int) -> None:
    """Have the kernel give this process 1 GiB of one kind of pages."""
    memory = mmap.mmap(-1, _TOUCH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    print(f"fill 1 GiB, {name:11}, memory free for {_PAUSE_S} s: {cost(partial(flat.fill_, 1))}", flush=True)


def load_once(path: Path, pages: str) -> None:
    """Load a cold file as the first thing that this process does."""
    if pages == _SMALL_ONLY and ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        sys.exit("the kernel does not turn huge pages off")
    spent = cost(lambda: deepnvme.load(path, progress=False))
    print(f"first load, {pages:19}, memory free for {_PAUSE_S} s: {spent}", flush=True)


def main() -> int:
    """Measure each part, and print the costs."""
    return run("parts", __doc__, measure, rounds=3)


def measure(rounds: int, scratch: Path) -> None:
    """Measure each part in processes of its own, and print its costs."""
    # Processes of their own: memory that one has used comes back to the next one of the same process faster.
    spawn = multiprocessing.get_context("spawn")

    def apart(work: Callable[..., None], *parameters: object) -> None:
        process = spawn.Process(target=work, args=parameters)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)

    apart(touches, rounds)
    for _ in range(rounds):
        for kind, advice in (("small pages", mmap.MADV_NOHUGEPAGE), ("huge pages", mmap.MADV_HUGEPAGE)):
            time.sleep(_PAUSE_S)
            apart(touch_once, kind, advice)
    apart(pickling, rounds)
    apart(plans, scratch, rounds)
    path = scratch / "parts.safetensors"
    apart(_save, path)
    for verify in ("sample", "off"):
        apart(loads, path, rounds, verify)
    for index in range(2 * rounds):
        cache.make_cold(path)
        time.sleep(_PAUSE_S)
        apart(load_once, path, _SMALL_ONLY if index % 2 else "huge pages by trial")


def _save(path: Path) -> None:
    deepnvme.save(bf16_300(), path, progress=False)


if __name__ == "__main__":
    sys.exit(main())
