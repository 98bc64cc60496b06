"""Networks, optimizers and steps for the tests of state on disk."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from deepnvme import optim

MEMORY = 256 << 10

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {"lr": 1e-3}),
    (optim.Adam, {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.1}),
    (optim.Lion, {"lr": 1e-4}),
    (optim.SGD, {"lr": 1e-2}),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}),
    (optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
]


class Net(nn.Module):
    """Parameters of many sizes: larger than a group, tiny, non-contiguous, and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.lines = nn.ModuleList(nn.Linear(150 + 7 * index, 157 + 7 * index) for index in range(8))
        self.last = nn.Linear(206, 3)
        self.unused = nn.Linear(5, 5)
        self.first = nn.Linear(8, 150)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(torch.relu(self.image(x)).mean((2, 3)))
        for line in self.lines:
            hidden = torch.relu(line(hidden))
        answer: torch.Tensor = self.last(hidden)
        return answer


def twins(dtype: torch.dtype = torch.float32) -> tuple[Net, Net]:
    torch.manual_seed(1)
    net = Net().to(dtype)
    return net, copy.deepcopy(net)


def loss_of(net: Net, step: int) -> torch.Tensor:
    """Return the loss for the inputs of a step."""
    torch.manual_seed(step)
    loss: torch.Tensor = net(torch.randn(4, 3, 6, 6).to(net.last.weight.dtype)).float().square().mean()
    return loss


def train(net: Net, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    """Take steps. In every third, one parameter has no gradient."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()  # type: ignore[no-untyped-call]
        if step % 3 == 2:
            net.lines[2].weight.grad = None
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same_parameters(one: Net, other: Net) -> None:
    for (name, mine), his in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, his), name


def groups(net: Net) -> list[dict[str, Any]]:
    rest = [*net.first.parameters(), *net.last.parameters(), *net.unused.parameters()]
    return [{"params": [*net.lines.parameters(), *net.image.parameters()]}, {"params": rest, "lr": 2e-3}]
