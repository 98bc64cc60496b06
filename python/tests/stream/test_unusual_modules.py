"""Streamed modules that change their buffers, return their weights, or are assigned each other's weights."""

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


class Cache(nn.Module):
    """Writes its input into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cache: torch.Tensor
        self.position: torch.Tensor
        self.register_buffer("cache", torch.zeros(32, WIDTH))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[self.position] = x[0]
        self.position.add_(1)
        answer: torch.Tensor = torch.tanh(self.linear(x)) + self.cache.sum(0)
        return answer


class Mean(nn.Module):
    """Assigns a new tensor to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        answer: torch.Tensor = self.linear(x) - self.mean
        return answer


class Normed(nn.Module):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.norm(self.linear(x))
        return answer


class Table(nn.Module):
    """Returns a part of its weight."""

    def __init__(self, how: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(50, WIDTH)), how

    def forward(self) -> Any:
        return self.how(self.weight)


class Positions(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.table = Table(how)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.table()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        while not isinstance(added, torch.Tensor):
            added = next(iter(added.values())) if isinstance(added, dict) else added[0]
        return x + added


def chain(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(layer() for _ in range(4)))


def streamed(tmp_path: Path, model: nn.Module, memory: str) -> tuple[nn.Module, Any]:
    model.eval().requires_grad_(requires_grad=False)
    deepnvme.save(model.state_dict(), tmp_path / "m.safetensors")
    return model, deepnvme.stream(copy.deepcopy(model), weights=tmp_path / "m.safetensors", memory=memory)


MEMORY = ["60kB", "100kB", "10MB"]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("layer", [Cache, Mean, Normed])
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_buffers_keep_values_that_their_module_writes(
    tmp_path: Path, memory: str, layer: Callable[[], nn.Module], inference: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    expected, model = streamed(tmp_path, chain(layer), memory)
    with inference():
        for is_training in (True, True, False):
            expected.train(is_training)
            model.train(is_training)
            x = torch.randn(4, WIDTH)
            assert torch.equal(model(x), expected(x))
    model.streaming.close()


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    "how",
    [
        lambda weight: weight[:5],
        lambda weight: weight.narrow(0, 0, 5)[None],
        lambda weight: weight.split(5)[0],
        lambda weight: {"a": [weight.t()[:, :5].t()]},
        lambda weight: weight.detach().data[:5],
    ],
)
def test_results_that_view_a_weight(tmp_path: Path, memory: str, how: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    expected, model = streamed(tmp_path, Positions(how), memory)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 5, WIDTH)
            assert torch.equal(model(x), expected(x))
    model.streaming.close()


def exchange(model: Any) -> None:
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def tie(model: Any) -> None:
    model[3].weight = model[0].weight


@pytest.mark.parametrize("change", [exchange, tie])
def test_weights_that_are_assigned_to_each_other(tmp_path: Path, change: Callable[[Any], None]) -> None:
    expected, model = streamed(tmp_path, chain(lambda: nn.Linear(WIDTH, WIDTH)), "60kB")
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        model(x)
        change(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was replaced while it is streamed"):
                model(x)
        model.streaming.close()
        assert torch.equal(model(x), expected(x))


def test_a_parameter_that_its_module_changes(tmp_path: Path) -> None:
    class Changes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.mul_(2)
            return super().forward(x)

    _, model = streamed(tmp_path, chain(lambda: Changes(WIDTH, WIDTH)), "60kB")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"0\.weight was changed in place"):
        model(torch.randn(2, WIDTH))
    model.streaming.close()


def test_an_embedding_scales_its_rows_in_each_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    embedding = nn.Sequential(nn.Embedding(500, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    expected, model = streamed(tmp_path, embedding, "200kB")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randint(0, 500, (40,))
            assert torch.equal(model(x), expected(x))
    model.streaming.close()


@pytest.mark.parametrize("memory", ["200KB", "300KB", "1MB"])
def test_torch_modules_that_compute_with_the_weights_of_their_children(tmp_path: Path, memory: str) -> None:
    """In evaluation, one kernel takes all weights of a ``TransformerEncoderLayer``."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0) for _ in range(4)]
    model = nn.Sequential(*layers).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = model(x)
    deepnvme.save(model.state_dict(), tmp_path / "model.safetensors")
    streamed = deepnvme.stream(model, weights=tmp_path / "model.safetensors", memory=memory)
    with torch.no_grad():
        assert torch.equal(streamed(x), expected)
    streamed.streaming.close()


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none, self.some = nn.Linear(WIDTH, 0), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.some(values) + self.none(values).sum()
        return result


def test_a_layer_without_elements_leaves_the_meta_device(tmp_path: Path) -> None:
    in_memory = Empty()
    deepnvme.save(in_memory.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        made = Empty()
    streamed = deepnvme.stream(made, weights=tmp_path / "model.safetensors", memory="400kB")
    with torch.no_grad(), streamed.streaming:
        assert torch.equal(streamed(torch.ones(2, WIDTH)), in_memory(torch.ones(2, WIDTH)))


def test_dimensions_of_one_element_may_have_any_stride(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1))
    model.to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous() and model[0].weight.stride() == (4, 1, 4, 4)
    deepnvme.save(model.state_dict(), tmp_path / "model.pt")
    images = torch.rand(2, 4, 3, 3)
    # torch picks its kernel by memory format, and a new model has the usual one.
    in_memory: Any = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1))
    streamed = deepnvme.stream(copy.deepcopy(in_memory), weights=tmp_path / "model.pt", memory="100kB")
    in_memory.load_state_dict(model.state_dict())
    with torch.no_grad(), streamed.streaming:
        assert torch.equal(streamed(images), in_memory(images))
