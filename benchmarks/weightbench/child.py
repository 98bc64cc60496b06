"""``python -m weightbench.child NAME FOLDER LAYERS SMALL``: fill a model once, in a new process.

A server loads a model once per process. So every turn is a new process: it imports everything, builds the model's
memory, fills a small model, and reports that it is ready. Then it fills the large one and replies with one line of
JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import zlib
from pathlib import Path

import torch

from common.measure import timed
from weightbench.model import modules
from weightbench.tools import EVERYBODY, Weights

SMALL_LAYERS = 1
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def fill(weights: Weights, model: dict[str, torch.Tensor]) -> None:
    """Copy every tensor to its place, as ``load_weights`` of a model does."""
    left = set(model)
    for name, tensor in weights:
        model[name].copy_(tensor)
        left.discard(name)
    if left:
        raise RuntimeError(f"not given: {sorted(left)[:3]}")


def sums(model: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes."""
    return {name: zlib.crc32(tensor.view(torch.uint8).numpy().data) for name, tensor in model.items()}


def _resident_bytes(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text("ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Fill, when told to by a line on standard input."""
    # Output that a library prints must not mix with the replies.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, folder, layers, small = sys.argv[1:]
    give = EVERYBODY[name]
    fill(give(Path(small)), modules(SMALL_LAYERS))
    model = modules(int(layers))
    nbytes = sum(tensor.nbytes for tensor in model.values())
    print("ready", file=answers, flush=True)
    is_to_be_compared = sys.stdin.readline().strip() == "compare"
    before = _resident_bytes("VmRSS")
    if os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text("5", encoding="ascii")
    sample, _ = timed(lambda: fill(give(Path(folder)), model), nbytes)
    answer = {
        "wall_s": sample.wall_s,
        "cpu_s": sample.cpu_s,
        "grown_bytes": _resident_bytes("VmHWM") - before,
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        "sums": sums(model) if is_to_be_compared else {},
    }
    print(json.dumps(answer), file=answers, flush=True)
    # Threads of baselines have been seen to hang at the end of a process that has nothing to lose.
    os._exit(0)


if __name__ == "__main__":
    main()
