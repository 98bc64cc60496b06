"""Gradients are added up in the order of training in memory, also across the edges of blocks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepnvme

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 64


class RepeatsInput(nn.Module):
    """Uses its input several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH) for index in range(times)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = torch.zeros_like(x)
        for layer in self.layers.values():
            answer = answer + torch.tanh(layer(x)) * x
        return answer


class ChangesInput(nn.Module):
    """Changes its input in place first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x.mul_(0.5))
        return answer


class CallsBlock(nn.Module):
    """Calls a module that is a block by itself."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.last(torch.tanh(self.others[0](torch.tanh(self.first(x))))) + x
        return answer


class ReturnsInput(nn.Module):
    """Returns its input and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.layer(x)), x


class Residual(nn.Module):
    """Has a residual connection outside of its blocks."""

    def __init__(self, layers: list[nn.Module], how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(layers), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.how == "before":
                x = torch.sin(x) + layer(x)
            elif self.how == "after":
                x = layer(x) + torch.sin(x)
            elif self.how == "branches":
                x = layer(x) + x + layer(torch.cos(x)) + torch.sin(x)
            elif self.how == "a copy":
                x = x + layer(x.clone())
            else:
                answer: Any = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
                x = torch.sin(x) + answer
        return x


def three() -> list[nn.Module]:
    return [RepeatsInput(3) for _ in range(4)]


def calling() -> list[nn.Module]:
    last = RepeatsInput(2)
    return [*(CallsBlock(last) for _ in range(2)), RepeatsInput(1), last]


CASES: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    **{how: (three, how) for how in ("before", "after", "branches", "reentrant", "checkpointed")},
    "changed input": (lambda: [ChangesInput() for _ in range(4)], "a copy"),
    "a block in a block": (calling, "before"),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("memory", ["200kB", "10MB"])
def test_the_same_bits(tmp_path: Path, case: str, memory: str, in_backward: bool) -> None:
    torch.manual_seed(0)
    layers, how = CASES[case]
    plain = Residual(layers(), how)
    model = copy.deepcopy(plain)
    offloading = deepnvme.offload_parameters(model, memory=memory, swap_dir=tmp_path)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    offloading.attach(optimizers[1], in_backward=in_backward)
    for _ in range(3):
        x = torch.randn(7, WIDTH)
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        outputs = [one(given) for one, given in zip((plain, model), inputs, strict=True)]
        assert torch.equal(outputs[0], outputs[1])
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*(given.grad for given in inputs))  # type: ignore[arg-type]
    offloading.close()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_an_input_that_is_returned_is_no_result(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(ReturnsInput() for _ in range(4))
    model = copy.deepcopy(plain)
    offloading = deepnvme.offload_parameters(model, memory="60kB", swap_dir=tmp_path)
    given = torch.randn(7, WIDTH)
    found = []
    for layers in (plain, model):
        x = given.clone().requires_grad_()
        total, y = torch.zeros(()), x
        for layer in layers:
            y, same = layer(y)
            total = total + same.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        assert not x._backward_hooks
        found.append([x.grad, *(parameter.grad for parameter in layers.parameters())])
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(*found, strict=True))
    offloading.close()
