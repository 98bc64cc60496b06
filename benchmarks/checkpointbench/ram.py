"""``python -m checkpointbench.ram``: save to and load from a folder in memory, without a disk as the limit.

The reference is a copy of the state in memory with the same number of threads: into existing tensors, and into new
ones as a load does. Each round has all actions in turn; ratios are taken within the rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deepnvme
import torch

from checkpointbench.states import STATES, State
from common.memory import touch

ROUNDS = 7


def copier(state: State, threads: int) -> Callable[[State], None]:
    """Return a function that copies the state into another one with several threads."""
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)

    def copy(target: State) -> None:
        for done in [pool.submit(target[name].copy_, tensor) for name, tensor in state.items()]:
            done.result()

    return copy


def plain_io(path: Path, size: int, threads: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that write a new file and read it with plain calls: the speed of the file system itself."""
    pool = ThreadPoolExecutor(threads)
    # So large that the calls cost nothing, and none of it stays in the CPU's cache.
    pieces = [memoryview(bytearray(os.urandom(128 << 20))) for _ in range(threads)]
    step = len(pieces[0])

    def share_out(file: int, call: Callable[[int, memoryview, int], int]) -> None:
        def some(number: int) -> None:
            for offset in range(number * step, size, threads * step):
                call(file, pieces[number][: size - offset], offset)

        for done in [pool.submit(some, number) for number in range(threads)]:
            done.result()
        os.close(file)

    def write() -> None:
        path.unlink(missing_ok=True)
        share_out(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), os.pwrite)

    def read() -> None:
        share_out(os.open(path, os.O_RDONLY), lambda file, piece, offset: os.preadv(file, [piece], offset))

    return write, read


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="checkpointbench.ram", description=__doc__)
    # The folder that every Linux has in memory.
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    state = STATES["bf16-300"]()
    size = sum(tensor.nbytes for tensor in state.values())
    folder = Path(tempfile.mkdtemp(dir=arguments.scratch))
    copy = copier(state, arguments.threads)
    write, read = plain_io(folder / "plain", size, arguments.threads)
    existing = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    actions: dict[str, Callable[[], object]] = {
        "copy, existing memory": lambda: copy(existing),
        "copy, new memory": lambda: copy({name: torch.empty_like(tensor) for name, tensor in state.items()}),
        "pwrite, new file": write,
        "pread, existing memory": read,
        "save .pt": lambda: deepnvme.save(state, folder / "a.pt", progress=False),
        "save .safetensors": lambda: deepnvme.save(state, folder / "a.safetensors", progress=False),
        "load .pt": lambda: touch(deepnvme.load(folder / "a.pt", progress=False).values()),
        "load .safetensors": lambda: touch(deepnvme.load(folder / "a.safetensors", progress=False).values()),
        "load .pt into=": lambda: deepnvme.load(folder / "a.pt", into=existing, progress=False),
        "torch.load": lambda: touch(torch.load(folder / "a.pt", weights_only=True).values()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    try:
        for number in range(ROUNDS + 1):
            for name, action in actions.items():
                began = time.perf_counter()
                action()
                if number > 0:
                    seconds[name].append(time.perf_counter() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{size / 1e9:.2f} GB in {arguments.scratch}, {ROUNDS} rounds; x: speed relative to each of the two copies"
    )
    for name, values in seconds.items():
        ratios = [
            statistics.median(base / mine for base, mine in zip(seconds[row], values, strict=True))
            for row in list(actions)[:2]
        ]
        print(f"{name:28} {size / statistics.median(values) / 1e9:6.2f} GB/s  x {ratios[0]:.2f}  x {ratios[1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
