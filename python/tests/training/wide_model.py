"""A model of about ten megabytes, and a memory limit for the process that trains it."""

from __future__ import annotations

import ctypes
import hashlib
import resource
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH, DEPTH, STEPS = 1024, 12, 3
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
PARAMETER_BYTES = DEPTH * LAYER_BYTES
_MMAP_THRESHOLD = -3
# AdamW's state.
STATE_BYTES = 2 * PARAMETER_BYTES


def model() -> nn.Sequential:
    """Create it with initialised parameters."""
    made = shape().to_empty(device="cpu")
    for index in range(DEPTH):
        fill(made, index)
    return made


def shape() -> nn.Sequential:
    """Create it on the meta device without values."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(DEPTH)))


def fill(made: nn.Sequential, index: int) -> None:
    """Initialise a layer."""
    torch.manual_seed(index)
    layer = made[index]
    assert isinstance(layer, nn.Linear)
    layer.reset_parameters()


def train(made: nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    """Make some steps. Gradients are zeroed, not freed, so their memory exists all the time."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = made(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def digest(parameters: Iterable[torch.Tensor]) -> str:
    """Compute a sum over every bit."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().numpy().data)
    return found.hexdigest()


def limit(more: int) -> None:
    """Limit this process to its current memory plus that many bytes.

    ``RLIMIT_DATA`` counts private writable memory. ``RLIMIT_AS`` would also count memory that allocators, threads and
    GPU drivers have only reserved.
    """
    with open("/proc/self/status") as file:  # noqa: PTH123
        now = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, most))


def warm_up(folder: str) -> None:
    """Create everything that is created on first use: threads, pools, lazily imported modules."""
    import deepnvme

    torch.set_num_threads(1)
    # Return freed memory to the kernel: the limit is for memory in use, not for malloc's reserves.
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18)
    deepnvme.default_engine()
    small = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    offloading = deepnvme.offload_parameters(small, memory="64KiB", swap_dir=folder)
    optimizers = [
        torch.optim.AdamW(small.parameters()),
        deepnvme.optim.AdamW(small.parameters()),
        deepnvme.optim.AdamW(small.parameters(), swap_dir=folder, memory="64KiB"),
    ]
    for optimizer in optimizers:
        offloading.attach(optimizer)
        small(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    offloading.close()
