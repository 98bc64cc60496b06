"""Programs that form a group of ranks."""

from __future__ import annotations

import json
import pickle
import secrets
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from programs import program

if TYPE_CHECKING:
    from pathlib import Path

# The code around a test's own lines. It provides `rank`, `world`, `folder` and `Checkpointer`; `answer` goes back to
# the test. `state(seed)` has 72 MiB, more than four of the smallest shares, and non-tensor values. No two of its words
# are equal, nor in two states: multiples of an odd number are made in a quarter of the time of random bytes.
# gloo sometimes ends a process with std::terminate after its last line, hence `os._exit`.
BOOT = """
import datetime, json, os, signal, sys, threading, time, traceback
import torch, torch.distributed as dist
import deepnvme
from deepnvme import Checkpointer, errors
from pathlib import Path

def state(seed):
    made = seed << 32
    def numbers(n):
        nonlocal made
        made += n
        return torch.arange(made - n, made).mul_(-7046029254386353131).view(torch.float32)
    model = {"w": numbers(8 << 20).view(4096, -1), "b": numbers(50), "half": numbers(1 << 20).bfloat16()}
    optimizer = {"state": {0: {"m": numbers(200_000), "step": torch.tensor(float(seed))}}, "groups": [{"lr": 0.1}]}
    return {"model": {**model, "tied": model["w"], "rows": model["w"][7:9]}, "optimizer": optimizer, "step": seed}

def same(actual, expected):
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (actual, expected)))
    elif isinstance(expected, (dict, list)):
        assert len(actual) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            same(actual[key], expected[key])
    else:
        assert actual == expected, (actual, expected)

answer = failure = None
try:
    torch.set_num_threads(1)
    deepnvme._checkpoint.distributed.process_group.TIMEOUT = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    exec(code)
except BaseException as error:
    answer = f"{type(error).__name__}: {error}"
    traceback.print_exc()
    failure = True
Path(out).write_text(json.dumps([failure, answer]))
sys.stderr.flush()
os._exit(0)
"""


# The answer of a killed process.
KILLED = "killed"


def run(code: str, world: int, folder: Path, **values: Any) -> list[Any]:
    """Run a test's lines on every rank. Returns the answer of each, or its error."""
    token = secrets.token_hex(4)
    outs = [folder.parent / f"{token}-{rank}.json" for rank in range(world)]
    names = {"code": code, "world": world, "folder": folder, "rendezvous": folder.parent / token, **values}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(program(_with_names({**names, "rank": rank, "out": out}, BOOT)))
            for rank, out in enumerate(outs)
        ]
        statuses = [rank.wait() for rank in ranks]
    return [
        KILLED if status == -signal.SIGKILL else json.loads(out.read_text())[1]
        for status, out in zip(statuses, outs, strict=True)
    ]


def _with_names(names: dict[str, Any], code: str) -> str:
    return f"import pickle\nglobals().update(pickle.loads({pickle.dumps(names)!r}))\n{code}"
