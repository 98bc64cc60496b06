"""Parameters that the model itself has too, and passes that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import deepnvme

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 64


class Tied(nn.Module):
    """The root's own parameter is the weight of one of its children."""

    def __init__(self, *, uses_own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.uses_own = uses_own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_own:
            x = x @ self.embedding
        for layer in self.layers:
            x = layer(x).relu()
        found: torch.Tensor = self.head(x)
        return found


@pytest.mark.parametrize("memory", ["50KB", "1MB"])
@pytest.mark.parametrize("uses_own", [False, True])
def test_a_parameter_of_the_root_may_be_that_of_a_child(tmp_path: Path, memory: str, uses_own: bool) -> None:
    one, other = Tied(uses_own=uses_own), Tied(uses_own=uses_own)
    offloading = deepnvme.offload_parameters(one, memory=memory, swap_dir=tmp_path)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (one, other)]
    offloading.attach(optimizers[0])
    for seed in range(3):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    offloading.close()
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("change", ["load_state_dict", "gathered"])
def test_a_state_may_be_loaded_after_a_backward_pass_that_failed(tmp_path: Path, change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offloading = deepnvme.offload_parameters(model, memory="100KB", swap_dir=tmp_path)

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("a hook of the user")

    x = torch.randn(3, WIDTH)
    for index, layer in enumerate(model):
        x = layer(x)
        if index == 1:
            x.register_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        x.square().mean().backward()
    if change == "load_state_dict":
        offloading.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
    else:
        with offloading.gathered([*model.parameters()], write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    offloading.close()
    assert all(torch.equal(tensor, state[name] + 1) for name, tensor in model.state_dict().items())
