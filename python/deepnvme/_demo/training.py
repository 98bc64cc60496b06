"""An AdamW step: ``torch`` with its state in memory beside ``deepnvme.optim`` with its state on disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme import optim
from deepnvme._demo.comparison import Comparison, WrongResultError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = 3
_ROWS, _COLUMNS = 2048, 4096


def compare(nbytes: int, folder: Path, step: Callable[[str], None]) -> Comparison:
    """Train equal parameters of ``nbytes`` with both, step by step.

    Raises:
        WrongResultError: the parameters differ afterwards.
    """
    step("make parameters")
    count = max(nbytes // (4 * _ROWS * _COLUMNS), 2)
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in range(count)]
    theirs, ours = ([nn.Parameter(one.clone()) for one in data] for _ in range(2))
    total = sum(one.nbytes for one in data)
    memory = total // 4
    plain = torch.optim.AdamW(theirs, lr=1e-3)
    swapped = optim.AdamW(ours, lr=1e-3, swap_dir=folder, memory=memory)
    found = Comparison(
        "AdamW step",
        "million weights/s",
        "torch, in memory",
        f"{2 * total / 1e9:.2f} GB of state: all of it in torch's memory, {memory / 1e9:.2f} GB of it in deepnvme's",
    )
    for number in range(ROUNDS + 1):
        gradients = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in range(min(count, 2))]
        for name, optimizer, parameters in (("torch", plain, theirs), ("deepnvme", swapped, ours)):
            step(f"{name}: step {number + 1} of {ROUNDS + 1}")
            for index, parameter in enumerate(parameters):
                parameter.grad = gradients[index % len(gradients)].clone()
            began = time.perf_counter()
            optimizer.step()
            rate = total / 4 / 1e6 / (time.perf_counter() - began)
            # The first step creates the state.
            if number:
                (found.theirs if name == "torch" else found.ours).append(rate)
    if not all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)):
        raise WrongResultError("torch.optim.AdamW and deepnvme.optim.AdamW give different weights")
    return found
