"""State and parameters that exceed the memory limit of a process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from programs import output_of

from . import IMPORTS, wide_model
from .conftest import is_bitwise

if TYPE_CHECKING:
    from pathlib import Path

# Memory for state or parameters on disk.
STATE_MEMORY, PARAMETER_MEMORY = 4 << 20, 12 << 20
# Memory for steps: the gradient of a layer while it is added, stacks, allocators, and the bounce buffers of each worker
# that gets work, which are more workers on a busy machine.
CONSTANT = 32 << 20  # 16 is enough on a quiet one

# The buffers of a save of parameters, and its file.
BUFFERS = 32 << 20

BEGIN = (
    IMPORTS
    + """
import gc
import torch, deepnvme, wide_model
wide_model.warm_up(".")
"""
)

STATE = f"""
{BEGIN}
model = wide_model.model()
more = wide_model.PARAMETER_BYTES + {STATE_MEMORY} + {CONSTANT}  # the gradients, and what was given
assert {STATE_MEMORY} + {CONSTANT} < 0.5 * wide_model.STATE_BYTES
wide_model.limit(more)
optimizer = deepnvme.optim.AdamW(model.parameters(), swap_dir=".", memory={STATE_MEMORY}, threads=2)
wide_model.train(model, optimizer)
stats = optimizer.swap_stats()
assert stats.resident_bytes_peak <= {STATE_MEMORY}, stats
assert stats.stored_bytes >= wide_model.STATE_BYTES, stats
print(wide_model.digest(model.parameters()))
del optimizer
gc.collect()
for kind in (torch.optim.AdamW, deepnvme.optim.AdamW):
    try:
        wide_model.train(model, kind(model.parameters()))
    except (RuntimeError, MemoryError) as error:
        assert "memory" in str(error), error
    else:
        raise SystemExit("the limit limits nothing")
    gc.collect()
"""

LARGE = """
BEGIN
assert GIVEN < wide_model.PARAMETER_BYTES
wide_model.limit(GIVEN + IN_MEMORY)
model = wide_model.shape()
offloading = deepnvme.offload_parameters(model, memory=PARAMETER_MEMORY, swap_dir=".")
assert offloading.parameter_bytes >= wide_model.PARAMETER_BYTES
for index, layer in enumerate(model):
    with offloading.gathered(layer.parameters(), write=True):
        wide_model.fill(model, index)
optimizer = deepnvme.optim.AdamW(
    model.parameters(), swap_dir=".", memory=STATE_MEMORY, threads=2, swap_gradients=SWAP_GRADIENTS
)
offloading.attach(optimizer, in_backward=IN_BACKWARD)
wide_model.train(model, optimizer)
assert offloading.stats().resident_bytes_peak <= PARAMETER_MEMORY
assert optimizer.swap_stats().resident_bytes_peak <= STATE_MEMORY
assert optimizer.swap_stats().stored_bytes >= wide_model.STATE_BYTES
digests = []
for layer in model:
    with offloading.gathered(layer.parameters()):
        digests.append(wide_model.digest(layer.parameters()))
print(*digests)
optimizer.save_state("optimizer.safetensors")
wide_model.limit(BUFFERS)
assert BUFFERS < wide_model.PARAMETER_BYTES
offloading.save("model.safetensors", progress=False)
try:
    wide_model.model()
except (RuntimeError, MemoryError) as error:
    assert "memory" in str(error), error
else:
    raise SystemExit("the limit limits nothing")
"""


def large(gradients: str) -> str:
    """Train with parameters and state on disk, and gradients on disk, in memory, or used immediately."""
    values = {
        "BEGIN": BEGIN,
        "BUFFERS": BUFFERS,
        "GIVEN": STATE_MEMORY + PARAMETER_MEMORY + CONSTANT,
        "IN_BACKWARD": gradients == "used up",
        "IN_MEMORY": "wide_model.PARAMETER_BYTES" if gradients == "in memory" else 0,
        "PARAMETER_MEMORY": PARAMETER_MEMORY,
        "STATE_MEMORY": STATE_MEMORY,
        "SWAP_GRADIENTS": gradients == "on disk",
    }
    program = LARGE
    for name, value in values.items():
        program = re.sub(rf"(?<![.\w]){name}\b", str(value), program)
    return program


@pytest.fixture(scope="module")
def trained(one_thread: None) -> torch.nn.Sequential:
    """Return the result in this process, without a memory limit."""
    model = wide_model.model()
    kind: Any = torch.optim.AdamW if is_bitwise() else deepnvme.optim.AdamW
    wide_model.train(model, kind(model.parameters(), foreach=False))
    return model


def test_state_larger_than_the_memory_of_the_process(trained: torch.nn.Sequential, folder: Path) -> None:
    assert output_of(STATE, folder=folder).split() == [wide_model.digest(trained.parameters())]


@pytest.mark.parametrize("gradients", ["in memory", "on disk", "used up"])
def test_each_of_parameters_gradients_and_state_larger(
    trained: torch.nn.Sequential, folder: Path, gradients: str
) -> None:
    """The model exceeds the memory limit even without gradients, and is never in memory as a whole."""
    output = output_of(large(gradients), folder=folder)
    assert output.split() == [wide_model.digest(layer.parameters()) for layer in trained]
    saved = deepnvme.load(folder / "model.safetensors.index.json")
    for name, tensor in trained.state_dict().items():
        assert torch.equal(saved[name], tensor), name
