"""``python -m storagebench.trace_cost``: the cost of recording a trace, by 4 KiB calls with and without it in turn.

The file is in memory, so that only the calls are measured. One engine measures both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import deepnvme

_BLOCK_BYTES = 4096
_BLOCKS = 256
_CALLS = 5000


def main() -> int:
    """Measure, and print nanoseconds for each call."""
    parser = argparse.ArgumentParser(prog="storagebench.trace_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds: int = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "blocks")
        path.write_bytes(os.urandom(_BLOCK_BYTES * _BLOCKS))
        off: list[float] = []
        on: list[float] = []
        with deepnvme.Engine(direct="disabled") as engine, path.open("rb") as file:
            _calls(engine, file.fileno())
            for index in range(rounds):
                for is_on in (False, True) if index % 2 else (True, False):
                    if not is_on:
                        off.append(_calls(engine, file.fileno()))
                        continue
                    with engine.trace(Path(folder, "trace.json")):
                        on.append(_calls(engine, file.fileno()))
    ratio = median(with_it / without for with_it, without in zip(on, off, strict=True))
    print(f"off: median {median(off):.0f} ns, best {min(off):.0f}")
    print(f"on:  median {median(on):.0f} ns, best {min(on):.0f}")
    print(f"on is {ratio:.3f} times as long as off, the median of {rounds} rounds")
    return 0


def _calls(engine: deepnvme.Engine, descriptor: int) -> float:
    target = bytearray(_BLOCK_BYTES)
    read = engine.read
    start = time.perf_counter_ns()
    for index in range(_CALLS):
        read(target, descriptor, index % _BLOCKS * _BLOCK_BYTES)
    return (time.perf_counter_ns() - start) / _CALLS


if __name__ == "__main__":
    sys.exit(main())
