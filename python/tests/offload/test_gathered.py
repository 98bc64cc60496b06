"""Parameters within `gathered`: gradients of them, changes to them, and parameters made of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme

from .test_unusual_modules import WIDTH, linears

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("when", ["inside", "outside", "mixed"])
def test_a_penalty_on_gathered_parameters(tmp_path: Path, when: str) -> None:
    expected, model, x = linears(), linears(), torch.randn(3, WIDTH)
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)

    def penalty(layer: nn.Module) -> torch.Tensor:
        weight = layer.get_parameter("weight")
        return (weight.square().sum() + (weight @ weight.T).abs().mean() + weight[0].exp().sum()) * 1e-3

    loss = expected(x).square().mean() if when == "mixed" else torch.zeros(())
    for layer in expected.layers:
        loss = loss + penalty(layer)
    loss.backward()
    offloading: Any = model.offloading
    loss = model(x).square().mean() if when == "mixed" else torch.zeros(())
    for layer in model.layers:
        with offloading.gathered([*layer.parameters()]):
            one = penalty(layer)
            if when == "inside":
                one.backward()  # type: ignore[no-untyped-call]
        loss = loss + one
    if when != "inside":
        loss.backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert other.grad is None or torch.allclose(parameter.grad, other.grad)  # type: ignore[arg-type]
    offloading.close()


ASSIGNMENTS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda weight: setattr(weight, "data", torch.full((WIDTH, WIDTH), 0.5)),
    "its own data": lambda weight: setattr(weight, "data", weight.data.clamp(-0.01, 0.01)),
    "set_": lambda weight: weight.data.set_(torch.full((WIDTH, WIDTH), 0.5)),  # type: ignore[call-overload]
    "in place": lambda weight: weight.data.clamp_(-0.01, 0.01),
    "numpy": lambda weight: weight.detach().numpy().fill(0.5),
}


@pytest.mark.parametrize("change", ASSIGNMENTS)
@pytest.mark.parametrize("write", [True, False])
def test_changes_within_gathered_that_torch_does_not_count(tmp_path: Path, change: str, write: bool) -> None:
    model = linears()
    offloading = deepnvme.offload_parameters(model, memory="60kB", swap_dir=tmp_path)
    weight = model.get_parameter("layers.1.weight")
    before = model.state_dict()["layers.1.weight"]
    refused = pytest.raises(RuntimeError, match=r"layers\.\d\..*write=True")
    with (
        torch.no_grad(),
        nullcontext() if write or change == "set_" else refused,
        offloading.gathered([weight], write=write),
    ):
        ASSIGNMENTS[change](weight)
        inside = weight.detach().clone()
    for _ in range(2):
        model(torch.ones(1, WIDTH))
    after = model.state_dict()["layers.1.weight"]
    assert torch.equal(after, inside) or not write
    assert write or change != "data" or torch.equal(after, before)
    offloading.close()


@pytest.mark.parametrize("kind", ["weight_norm", "new parameter"])
def test_parameters_made_of_gathered_ones_keep_their_values(tmp_path: Path, kind: str) -> None:
    model = linears()
    offloading = deepnvme.offload_parameters(model, memory="60kB", swap_dir=tmp_path)
    layer: Any = model.layers[1]
    with offloading.gathered([*layer.parameters()], write=True):
        if kind == "weight_norm":
            torch.nn.utils.parametrizations.weight_norm(layer)
        else:
            layer.weight = nn.Parameter(layer.weight.data[:])
        inside = {name: value.detach().clone() for name, value in layer.named_parameters()}
    for _ in range(3):
        model(torch.ones(1, WIDTH)).sum().backward()
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in inside.items())
    offloading.close()
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in inside.items())
