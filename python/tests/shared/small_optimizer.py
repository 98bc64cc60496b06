"""An optimizer with two groups of small parameters and its state on disk, for attacks on a saved state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepnvme import optim

if TYPE_CHECKING:
    from pathlib import Path


def small_optimizer(folder: Path) -> optim.AdamW:
    """Return one without state."""
    torch.manual_seed(5)
    params = [torch.nn.Parameter(torch.randn(size)) for size in (9, 300, 1)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    return optim.AdamW(groups, lr=1e-3, swap_dir=folder, memory="64KiB")


def stepped_optimizer(folder: Path) -> optim.AdamW:
    """Return one after a step. Its last parameter has no gradient, so it has no state."""
    made = small_optimizer(folder)
    for param in made.param_groups[0]["params"]:
        param.grad = torch.randn_like(param)
    made.step()
    return made
