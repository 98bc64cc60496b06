"""Changes that modules make to their weights and buffers while they are streamed are kept or refused."""

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
MEMORY = ["80kB", "110kB", "10MB"]
swap_tensors: Any = torch.utils.swap_tensors


class Counter(nn.Module):
    """Has statistics, a counter, and a buffer that it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls: torch.Tensor
        self.last: torch.Tensor
        self.register_buffer("calls", torch.zeros(8, dtype=torch.long))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.last = x.mean(0)
        answer: torch.Tensor = self.norm(self.linear(x))
        return answer


class Changing(nn.Linear):
    """Changes its weight in a given way."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.weight)
        return super().forward(x)


def streamed(tmp_path: Path, model: nn.Module, memory: str, *, on_meta: bool = False) -> tuple[Any, Any]:
    deepnvme.save(model.state_dict(), tmp_path / "m.safetensors")
    other = copy.deepcopy(model)
    if on_meta:
        other = other.to("meta")
    return model, deepnvme.stream(other, weights=tmp_path / "m.safetensors", memory=memory)


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_changed_buffers_are_readable_and_kept(
    tmp_path: Path, memory: str, inference: Callable[[], Any], on_meta: bool
) -> None:
    torch.manual_seed(0)
    expected, model = streamed(tmp_path, nn.Sequential(*(Counter() for _ in range(4))), memory, on_meta=on_meta)
    expected.train()
    model.train()
    with inference():
        for _ in range(3):
            x = torch.randn(4, WIDTH)
            assert torch.equal(model(x), expected(x))
            for (name, one), other in zip(buffers(model).items(), buffers(expected).values(), strict=True):
                assert torch.equal(one, other), name
    model[1].calls.zero_()
    expected[1].calls.zero_()
    with inference():
        model(x)
        expected(x)
    model.streaming.close()
    for (name, one), other in zip(buffers(model).items(), buffers(expected).values(), strict=True):
        assert torch.equal(one, other), name
    if not on_meta:
        expected.eval()
        model.eval()
        x = torch.randn(4, WIDTH)
        assert torch.equal(model(x), expected(x))


def test_buffers_that_nobody_changed_are_the_original_ones(tmp_path: Path) -> None:
    model = nn.Sequential(*(Counter() for _ in range(4))).eval()
    deepnvme.save({name: tensor + 1 for name, tensor in model.state_dict().items()}, tmp_path / "m.safetensors")
    before = dict(model.named_buffers())
    values = buffers(model)
    model = deepnvme.stream(model, weights=tmp_path / "m.safetensors", memory="60kB")
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    model.streaming.close()
    for name, buffer in model.named_buffers():
        if not name.endswith("last"):
            assert buffer is before[name]
        if "norm" in name:
            assert torch.equal(buffer, values[name])


def test_modules_that_share_a_buffer_share_its_changes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(WIDTH) for _ in range(4)]
    for norm in norms[1:]:
        norm.running_mean = norms[0].running_mean
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for norm in norms))
    expected, model = streamed(tmp_path, plain, "60kB")
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(4, WIDTH)
            assert torch.equal(model(x), expected(x))
    model.streaming.close()
    assert model[3][1].running_mean is model[0][1].running_mean
    assert torch.equal(model[3][1].running_mean, expected[3][1].running_mean)


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.mul_(2),
    "a part of the data": lambda weight: weight.data[0].zero_(),
    "data of the data": lambda weight: weight.data.detach().clamp_(max=0),
    "detached": lambda weight: weight.detach().zero_(),
    "assigned data": lambda weight: setattr(weight, "data", torch.zeros_like(weight)),
    "swapped": lambda weight: swap_tensors(weight, nn.Parameter(torch.zeros_like(weight))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("memory", ["40kB", "100kB"])
def test_a_changed_weight_is_refused(tmp_path: Path, change: str, memory: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    plain[2] = Changing(lambda _: None)
    expected, model = streamed(tmp_path, plain, memory)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        right = expected(x)
        model[2].change = CHANGES[change]
        with pytest.raises(RuntimeError, match=r"streamed from its file|weakref"):
            model(x)
        model[2].change = lambda weight: weight.data.sum()
        for _ in range(3):
            assert torch.equal(model(x), right)
    model.streaming.close()
    assert torch.equal(model(x), right)


@pytest.mark.parametrize("change", ["in place", "data", "assigned data"])
def test_a_changed_weight_that_stays_in_memory_is_kept(tmp_path: Path, change: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            CHANGES[change](self.scale)
            for layer in self.layers:
                x = layer(x)
            return x * self.scale

    torch.manual_seed(0)
    expected, model = streamed(tmp_path, Scale(), "60kB")
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected(x))
    model.streaming.close()
    with torch.no_grad():
        assert torch.equal(model.scale, expected.scale)
        assert torch.equal(model(x), expected(x))


def test_a_copy_of_a_weight_in_its_module_is_a_parameter(tmp_path: Path) -> None:
    copies: list[nn.Parameter] = []
    layers = [Changing(lambda _: None) for _ in range(4)]
    _, model = streamed(tmp_path, nn.Sequential(*layers), "40kB")
    for layer in model:
        layer.change = lambda weight: copies.append(copy.deepcopy(weight))
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    model.streaming.close()
    assert all(type(made) is nn.Parameter for made in copies)
    assert all(torch.equal(made, layer.weight) for made, layer in zip(copies, layers, strict=True))
