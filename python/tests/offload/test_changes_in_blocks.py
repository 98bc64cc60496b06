"""Changes that a block makes to its parameters on disk are refused, however they are made."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 64
swap_tensors: Any = torch.utils.swap_tensors


class Own(nn.Parameter):
    """A parameter of a class of its own."""


class Changing(nn.Linear):
    """Changes its weight in a given way."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change: Callable[[Any], Any] = lambda _: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.change(self.weight)
        return super().forward(x)


def made(tmp_path: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Changing() for _ in range(4)))
    expected = copy.deepcopy(model)
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    return model, expected


def other() -> nn.Parameter:
    return nn.Parameter(torch.zeros(WIDTH, WIDTH))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.mul_(2),
    "a part of the data": lambda weight: weight.data[0].zero_(),
    "detached": lambda weight: weight.detach().zero_(),
    "assigned data": lambda weight: setattr(weight, "data", torch.zeros_like(weight)),
    "swapped": lambda weight: swap_tensors(weight, other()),
    "swapped from outside": lambda weight: swap_tensors(other(), weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_a_block_is_refused(tmp_path: Path, change: str) -> None:
    model, expected = made(tmp_path)
    x = torch.randn(2, WIDTH)
    model[2].change = CHANGES[change]
    with pytest.raises(RuntimeError, match=r"2\.weight was changed without exclusive access|weakref"):
        model(x)
    model[2].change = lambda weight: weight.data.sum()
    model.offloading.load_state_dict(expected.state_dict())
    for _ in range(2):
        model.zero_grad()
        expected.zero_grad()
        output, right = model(x), expected(x)
        assert torch.equal(output, right)
        output.sum().backward()
        right.sum().backward()
        assert all(torch.equal(one.weight.grad, two.weight.grad) for one, two in zip(model, expected, strict=True))
    model.offloading.close()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("kind", [nn.Parameter, Own])
@pytest.mark.parametrize("change", ["swapped", "swapped from outside"])
def test_a_parameter_is_not_swapped(tmp_path: Path, change: str, kind: type[nn.Parameter]) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers:
        layer.weight = kind(layer.weight.data)
    model: Any = nn.Sequential(*layers)
    weight = model[1].weight
    before = weight.detach().clone()
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"1\.weight is on disk|weakref"):
        CHANGES[change](weight)
    with (
        model.offloading.gathered([weight], write=True),
        pytest.raises(RuntimeError, match="weakref"),
    ):
        CHANGES[change](weight)
    with model.offloading.gathered([weight]):
        assert torch.equal(weight, before)
    model.offloading.close()
    swap_tensors(weight, kind(torch.zeros(WIDTH, WIDTH)))
    assert not weight.any()


def test_copies_are_of_torchs_class(tmp_path: Path) -> None:
    model, _ = made(tmp_path)
    copies: list[Any] = []
    model[1].change = lambda weight: copies.append(copy.deepcopy(weight))
    model(torch.randn(2, WIDTH))
    assert type(copies[0]) is nn.Parameter
    copies[0].data.zero_()
    with model.offloading.gathered([model[1].weight]):
        assert model[1].weight.any()
        assert type(model[1].weight) is nn.Parameter
