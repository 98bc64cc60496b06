"""Modules that use parameters, arguments and results in unusual ways compute as in memory, or say why not."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import deepnvme
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 64


class Chain(nn.Module):
    """Layers, one after another."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def linears() -> Chain:
    torch.manual_seed(0)
    return Chain([nn.Linear(WIDTH, WIDTH) for _ in range(4)])


class Attention(nn.Module):
    """Self-attention: torch takes another path if the query is the key."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return mixed


class Twice(nn.Module):
    """Asks whether its arguments are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"one": Same()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.inner["one"](x, x)
        return answer


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a) if a is b else self.linear(a) + self.linear(b)  # type: ignore[no-any-return]


class ReturnsAView(nn.Module):
    """A learned position: a part of its own parameter."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.how = nn.Parameter(torch.randn(50, WIDTH)), how

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.how(self.table)


class Positions(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.positions = ReturnsAView(how)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, added = self.positions(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        answer: torch.Tensor = x + added
        return answer


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    output = model(x)
    output.square().mean().backward()
    return [
        output.detach(),
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda table: table[:5],
    "narrow": lambda table: table.narrow(0, 0, 5)[None],
    "split": lambda table: table.view(50, WIDTH).chunk(10)[0],
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Chain([Attention() for _ in range(3)]),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0, batch_first=True), 3),
    "identity": lambda: Chain([Twice() for _ in range(4)]),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True),
    **{f"returns {name}": lambda how=how: Positions(how) for name, how in VIEWS.items()},  # type: ignore[misc]
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("memory", ["300kB", "10MB"])
def test_the_same_bits(tmp_path: Path, name: str, memory: str) -> None:
    torch.manual_seed(0)
    model = MODULES[name]()
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    run: Callable[[nn.Module], Any] = (
        (lambda one: results(LastState(one), x)) if name == "lstm" else lambda one: results(one, x)
    )
    expected = run(copy.deepcopy(model))
    deepnvme.offload_parameters(model, memory=memory, swap_dir=tmp_path)
    for one, other in zip(run(model), expected, strict=True):
        assert torch.equal(one, other)
    model.offloading.close()  # type: ignore[operator, union-attr]


class LastState(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.model(x)[0]
        return answer


def hooked(layer: nn.Module, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "prune":
            prune.l1_unstructured(layer, "weight", 0.4)  # type: ignore[no-untyped-call]
        elif kind == "weight_norm":
            torch.nn.utils.weight_norm(layer)
        elif kind == "spectral_norm":
            torch.nn.utils.spectral_norm(layer)
        elif kind == "parametrized":
            torch.nn.utils.parametrizations.weight_norm(layer)
        elif kind == "before":
            layer.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.abs().mean(),))
        else:
            layer.register_forward_hook(lambda module, _, output: output * module.weight.abs().mean())


@pytest.mark.parametrize("kind", ["prune", "weight_norm", "spectral_norm", "parametrized", "before", "after"])
def test_hooks_of_a_block_see_its_weights(tmp_path: Path, kind: str) -> None:
    x = torch.randn(3, WIDTH)
    models = [linears(), linears()]
    for model in models:
        torch.manual_seed(1)
        for layer in model.layers:
            hooked(layer, kind)
    deepnvme.offload_parameters(models[1], memory="100kB", swap_dir=tmp_path)
    for _ in range(2):
        for one, other in zip(results(models[1], x), results(models[0], x), strict=True):
            assert torch.equal(one, other)
    models[1].offloading.close()  # type: ignore[operator, union-attr]


def exchange(model: Chain) -> None:
    one, other = model.layers[0], model.layers[2]
    one.weight, other.weight = other.weight, one.weight


def tie(model: Chain) -> None:
    model.layers[3].weight = model.layers[0].weight


@pytest.mark.parametrize("change", [exchange, tie])
def test_parameters_that_are_assigned_elsewhere(tmp_path: Path, change: Callable[[Chain], None]) -> None:
    model, expected, x = linears(), linears(), torch.randn(3, WIDTH)
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    change(model)
    change(expected)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"was assigned the parameter layers\.\d\.weight"):
            model(x)
    model.offloading.close()  # type: ignore[operator, union-attr]
    assert torch.equal(model(x), expected(x))


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "arithmetic": lambda weight: weight + 1,
    "of another tensor": lambda weight: torch.ones(WIDTH, WIDTH).add_(weight),
    "view": lambda weight: weight[0].sum(),
    "detach": lambda weight: weight.detach().sum(),
    "data": lambda weight: weight.data.sum(),
    "clone": lambda weight: weight.clone(),
    "copy": copy.deepcopy,
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "in place": lambda weight: weight.data.zero_(),
    "assignment": lambda weight: setattr(weight, "data", torch.zeros(WIDTH, WIDTH)),
    "conversion": lambda weight: weight.half(),
    "memory": lambda weight: weight.data_ptr(),
    "write": lambda weight: deepnvme.write(weight, "never"),
    "save": lambda weight: deepnvme.save({"weight": weight}, "never.pt"),
    "save as safetensors": lambda weight: deepnvme.save({"weight": weight}, "never.safetensors"),
}


@pytest.mark.parametrize("name", READS)
def test_values_that_are_on_disk_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = linears(), torch.randn(3, WIDTH)
    expected = results(model, x)
    model.zero_grad()
    (tmp_path / "swap").mkdir()
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path / "swap")
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match="on disk"):
        READS[name](model.get_parameter("layers.1.weight"))
    assert not [*tmp_path.glob("never*")]
    for one, other in zip(results(model, x), expected, strict=True):
        assert torch.equal(one, other)
    model.offloading.close()  # type: ignore[operator, union-attr]


def test_a_parameter_on_disk_is_still_a_parameter(tmp_path: Path) -> None:
    model = linears()
    weight = model.layers[0].weight
    shape, number = weight.shape, sum(parameter.numel() for parameter in model.parameters())
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    assert model.layers[0].weight is weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type, weight.is_leaf) == (shape, torch.float32, "cpu", True)
    assert sum(parameter.numel() for parameter in model.parameters()) == number
    assert torch.zeros_like(weight).shape == shape
    assert {weight: 1}[weight] == 1
    assert model.to("cpu") is model
    assert model.float() is model
    model.requires_grad_(requires_grad=False)
    assert not weight.requires_grad
    assert "OnDisk" in repr(weight)
    model.offloading.close()  # type: ignore[operator, union-attr]
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("shared", ["child", "layer", "parameter"])
def test_a_module_on_disk_is_refused(tmp_path: Path, shared: str) -> None:
    one, other, x = linears(), linears(), torch.randn(3, WIDTH)
    if shared == "layer":
        other.layers[1] = one.layers[1]
    elif shared == "parameter":
        other.layers[1].weight = one.layers[1].weight
    else:
        other = Chain([one, *linears().layers])
    expected = results(other, x)
    other.zero_grad()
    first = deepnvme.offload_parameters(one, memory="100kB", swap_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="is on disk already"):
        deepnvme.offload_parameters(other, memory="100kB", swap_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="is on disk already"):
        deepnvme.save(linears().state_dict(), tmp_path / "w.safetensors")
        deepnvme.stream(one if shared == "child" else other, weights=tmp_path / "w.safetensors", memory="100kB")
    first.close()
    for left, right in zip(results(other, x), expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("memory", ["150kB", "5MB"])
def test_double_backward(tmp_path: Path, memory: str) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = torch.ones(4, WIDTH, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).tanh().square().sum(), x, create_graph=True)
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))
    expected = gradients(copy.deepcopy(model))
    deepnvme.offload_parameters(model, memory=memory, swap_dir=tmp_path)
    for one, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(one, other)
    model.offloading.close()


@dataclasses.dataclass
class Pair:
    """A result that is no container of Python."""

    hidden: torch.Tensor
    row: torch.Tensor


class ReturnsAPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(self.linear(x).tanh(), self.linear.weight[0])


class SumsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsAPair() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = [Pair(x, x[0])]
        for block in self.blocks:
            pairs.append(block(pairs[-1].hidden))
        return torch.stack([pair.row for pair in pairs]).sum(0)


@pytest.mark.parametrize("where", ["stream", "offload"])
def test_views_in_a_data_class(tmp_path: Path, where: str) -> None:
    torch.manual_seed(0)
    model, x = SumsRows(), torch.randn(3, WIDTH)
    expected = copy.deepcopy(model)
    if where == "offload":
        deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
        for one, other in zip(results(model, x), results(expected, x), strict=True):
            assert torch.equal(one, other)
    else:
        deepnvme.save(model.state_dict(), tmp_path / "m.safetensors")
        model.requires_grad_(requires_grad=False)
        streamed: Any = deepnvme.stream(model, weights=tmp_path / "m.safetensors", memory="100kB")
        with torch.no_grad():
            assert torch.equal(streamed(x), expected(x))
