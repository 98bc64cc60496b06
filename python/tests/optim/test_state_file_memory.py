"""Loads and saves of state files stay within `memory` and a constant, and read each byte about once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from process_memory import PROCESS_MEMORY

# Memory of a load on top of `memory`, and with verify="full" for each thread that compares. docs/explanation/
# memory-models.md has these numbers.
EXTRA, FULL_PER_THREAD = 64 << 20, 32 << 20

PROGRAM = (
    PROCESS_MEMORY
    + """
import gc, os, sys, torch, deepnvme
from deepnvme import optim
torch.set_num_threads(1)

def reset():
    gc.collect()
    return restart_peak()

def made(param, memory, **options):
    return optim.AdamW([param], lr=0.1, swap_dir=".", memory=memory, **options)

def stepped(param, memory, **options):
    made_ = made(param, memory, **options)
    param.grad = torch.arange(param.numel(), dtype=torch.float32).remainder_(1009).as_strided(
        param.shape, param.stride())
    made_.step()
    param.grad = None
    return made_

# Memory of the first use of an engine.
small = torch.nn.Parameter(torch.zeros(1000))
with_engine = stepped(small, "1MB")
with_engine.save_state("small")
with_engine.load_state("small", verify="full")
with_engine.close()
EXTRA, MEMORY = EXTRA_BYTES, 8 << 20
"""
)


def run(python_fork: Callable[..., Any], program: str) -> None:
    python_fork(PROGRAM.replace("EXTRA_BYTES", str(EXTRA)) + program)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_a_load_into_smaller_groups(python_fork: Callable[..., Any], moments: str) -> None:
    run(
        python_fork,
        f"""
COUNT = 24_000_000
param = torch.nn.Parameter(torch.zeros(COUNT))
first = stepped(param, "512MiB", moments="{moments}")
first.save_state("state")
first.close()
second = made(param, MEMORY, moments="{moments}")
before = reset()
reads = deepnvme.stats().bytes_read
second.load_state("state", verify="off")
peak, reads = memory_bytes("VmHWM") - before, deepnvme.stats().bytes_read - reads
assert peak < MEMORY + EXTRA, (peak, MEMORY)
assert reads < 1.5 * os.stat("state").st_size + (32 << 20), (reads, os.stat("state").st_size)
found = second.state_dict()["state"][0]["exp_avg"]
wanted = torch.arange(COUNT, dtype=torch.float32).remainder_(1009) * 0.1
assert torch.allclose(found, wanted, rtol=0.15, atol=8.0), (found, wanted)
""",
    )


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_a_load_into_another_memory_order(python_fork: Callable[..., Any], moments: str) -> None:
    run(
        python_fork,
        f"""
MEMORY, ROWS, COLUMNS = 16 << 20, 3000, 4000
param = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS).t())
first = stepped(param, MEMORY, moments="{moments}")
first.save_state("state")
expected = first.state_dict()["state"][0]["exp_avg"]
first.close()
param = torch.nn.Parameter(torch.zeros(COLUMNS, ROWS))
second = made(param, MEMORY, moments="{moments}")
before = reset()
second.load_state("state")
peak = memory_bytes("VmHWM") - before
assert peak < MEMORY + EXTRA, (peak, MEMORY)
found = second.state_dict()["state"][0]["exp_avg"]
assert found.stride() == param.stride()
if "{moments}" == "fp32":
    assert torch.equal(found, expected)
else:
    # Other elements share a scale.
    assert torch.allclose(found, expected, rtol=0.15, atol=8.0)
""",
    )


@pytest.mark.parametrize("verify", ["auto", "full"])
def test_a_save_and_a_load(python_fork: Callable[..., Any], verify: str) -> None:
    run(
        python_fork,
        f"""
MEMORY = 1 << 20
param = torch.nn.Parameter(torch.zeros(24_000_000))
first = stepped(param, MEMORY)
before = reset()
first.save_state("state")
peak = memory_bytes("VmHWM") - before
assert peak < MEMORY + EXTRA, peak
before = reset()
first.load_state("state", verify="{verify}")
peak = memory_bytes("VmHWM") - before
threads = min(os.cpu_count(), 8) + 1
limit = MEMORY + EXTRA + (threads * {FULL_PER_THREAD} if "{verify}" == "full" else 0)
assert peak < limit, peak
""",
    )
