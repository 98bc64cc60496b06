"""Plan checkpoints of public models, and show how evenly their bytes are distributed over writers.

    python -m partition --results results            all models, at 8, 64 and 1,024 writers
    python -m partition --models gpt2 --writers 4

The plan is exact: weights in bf16, and AdamW's state in fp32 (a copy of the weights, two moments and the step
count). The tensors have addresses but no memory: planning does not read them.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import deepnvme
import torch
from deepnvme._checkpoint.pickler import pickle_with_storages
from deepnvme._checkpoint.save import SaveOptions, plan_archive
from deepnvme._deepnvme import _shard_ranges

from partition.models import MODELS, Model

SHARE_BYTES_MIN = 16 << 20
SPREAD_MAX = 0.05
PAGE_BYTES = 4096
# Python has no name for it before 3.13.
MAP_NORESERVE = 0x4000
# Bytes of a parameter: bf16, and three times fp32.
PARAMETER_BYTES = 2 + 3 * 4


def main(arguments: list[str]) -> int:
    """Print the table. Exit status 1 if a share is uneven or too small."""
    parser = argparse.ArgumentParser(prog="python -m partition", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--models", default=",".join(model.name for model in MODELS), help="names, separated by commas"
    )
    parser.add_argument("--writers", default="8,64,1024", help="numbers, separated by commas")
    parser.add_argument("--results", type=Path, help="the folder for a record as JSON")
    options = parser.parse_args(arguments)
    chosen = [model for model in MODELS if model.name in options.models.split(",")]
    rows = [row for model in chosen for row in plan(model, [int(count) for count in options.writers.split(",")])]
    print(table(rows))
    if options.results:
        record = {"date": time.strftime("%Y-%m-%d"), "deepnvme": deepnvme.__version__, "torch": torch.__version__}
        path = options.results / f"{record['date']}-partition.json"
        path.write_text(json.dumps({**record, "share_bytes_min": SHARE_BYTES_MIN, "rows": rows}, indent=1) + "\n")
        print(path)
    missed = [row for row in rows if not row["is_even"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} are within {SPREAD_MAX:.0%} of the mean and not below 16 MiB")
    return 1 if missed or not rows else 0


def plan(model: Model, writers: list[int]) -> list[dict[str, Any]]:
    """Plan the file once, and cut it for each number of writers."""
    state, memory = state_of(model)
    pickle, storages = pickle_with_storages(state)
    planned = plan_archive(pickle, list(storages), Path(f"{model.name}.pt"), SaveOptions())
    rows = []
    for asked in writers:
        sizes = [stop - start for start, stop in _shard_ranges(planned.nbytes, asked)]
        mean = planned.nbytes / len(sizes)
        spread = max(abs(size / mean - 1) for size in sizes)
        is_even = len(sizes) == 1 or (spread <= SPREAD_MAX and min(sizes) >= SHARE_BYTES_MIN)
        rows.append(
            {
                "model": model.name,
                "source": model.source,
                "parameters": model.parameters,
                "records": len(storages),
                "file_bytes": planned.nbytes,
                "writers_asked": asked,
                "writers": len(sizes),
                "share_bytes_mean": round(mean),
                "share_bytes_least": min(sizes),
                "share_bytes_most": max(sizes),
                "spread": spread,
                "is_even": is_even and sum(sizes) == planned.nbytes,
            }
        )
    del planned, storages, state, memory
    return rows


def state_of(model: Model) -> tuple[dict[str, Any], mmap.mmap]:
    """Return a state of that model whose tensors have no memory yet, and the mapping that they are views of."""
    shapes = list(model.shapes())
    found = sum(math.prod(shape) for _, shape in shapes)
    if found != model.parameters:
        message = f"{model.name} has {model.parameters} parameters, and its shapes add up to {found}"
        raise ValueError(message)
    nbytes = PARAMETER_BYTES * found + 5 * PAGE_BYTES * len(shapes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    used = 0

    def tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal used
        count = math.prod(shape)
        made = torch.frombuffer(memory, dtype=dtype, count=count, offset=used).view(shape)
        used += -(-made.nbytes // PAGE_BYTES) * PAGE_BYTES
        return made

    weights = {name: tensor(torch.bfloat16, shape) for name, shape in shapes}
    moments = {
        name: {
            "step": tensor(torch.float32, ()),
            "master": tensor(torch.float32, shape),
            "exp_avg": tensor(torch.float32, shape),
            "exp_avg_sq": tensor(torch.float32, shape),
        }
        for name, shape in shapes
    }
    return {"model": weights, "optimizer": {"state": moments}}, memory


def table(rows: list[dict[str, Any]]) -> str:
    """Draw the rows for people."""
    head = f"{'model':13} {'GB':>8} {'records':>8} {'asked':>6} {'writers':>8} {'MiB each':>9} {'spread':>7}  "
    lines = [head.rstrip()]
    for row in rows:
        share = row["share_bytes_mean"] / (1 << 20)
        lines.append(
            f"{row['model']:13} {row['file_bytes'] / 1e9:8.1f} {row['records']:8} {row['writers_asked']:6} "
            f"{row['writers']:8} {share:9.1f} {row['spread']:7.2%}  {'' if row['is_even'] else 'uneven'}".rstrip()
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
