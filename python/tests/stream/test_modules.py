"""Plain modules: gradients, modes, parametrised weights, and layers shared by several blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepnvme

from . import plain_module


def test_gradients(saved: plain_module.Saved) -> None:
    model = saved.stream()
    # With gradients enabled but not requested, as in many programs.
    assert torch.equal(model(saved.question), saved.answer)
    hidden = torch.rand(2, plain_module.WIDTH, requires_grad=True)
    through = model.layers[2](hidden)
    model(saved.question)
    with pytest.raises(RuntimeError, match=r"no gradients through the module 'layers\.2'"):
        through.sum().backward()
    # Later layers are trained as usual.
    head = nn.Linear(plain_module.ROWS, 2)
    head(model(saved.question)).sum().backward()
    assert head.weight.grad is not None
    model.streaming.close()


class Other(nn.Module):
    """Returns its output in a dictionary, where no tensor hook finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(plain_module.WIDTH, plain_module.WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            hidden = layer(hidden)
        return {"hidden": hidden}


def test_gradients_that_would_be_wrong(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Other() for _ in range(3))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = block(hidden)["hidden"]
            return hidden

    module = Whole()
    deepnvme.save(module.state_dict(), tmp_path / "weights.safetensors")
    model = deepnvme.stream(module, weights=tmp_path / "weights.safetensors", memory=1_200_000)
    answer = model(torch.rand(2, plain_module.WIDTH, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        answer.sum().backward()
    model.streaming.close()


def test_inference_mode_and_back(saved: plain_module.Saved) -> None:
    model = saved.stream()
    with torch.inference_mode():
        assert torch.equal(model(saved.question), saved.answer)
    assert torch.equal(model(saved.question), saved.answer)
    model.streaming.close()
    with torch.inference_mode():
        model = saved.stream()
    assert torch.equal(model(saved.question), saved.answer)
    model.streaming.close()


@pytest.mark.usefixtures("no_grad")
def test_parametrised_weights(tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval()
    for each in module:
        torch.nn.utils.parametrizations.weight_norm(each)
    question = torch.rand(3, 64)
    expected = module(question)
    deepnvme.save(module.state_dict(), tmp_path / "weights.safetensors")
    for memory in (40_000, 1_000_000):
        model = deepnvme.stream(module, weights=tmp_path / "weights.safetensors", memory=memory)
        assert torch.equal(model(question), expected)
        assert model.streaming.stats().bytes_read > 0
        model.streaming.close()


@pytest.mark.usefixtures("no_grad")
def test_layers_that_several_blocks_share(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(64, 64), shared

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.shared(self.own(hidden))
            return result

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
            self.blocks = nn.ModuleList(Block(shared) for _ in range(5))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    module, question = Whole().eval(), torch.rand(3, 64)
    expected = module(question)
    state: dict[str, Any] = {name: each for name, each in module.named_parameters()}  # noqa: C416 (without the other names)
    deepnvme.save(state, tmp_path / "weights.safetensors")
    for memory in (50_000, 200_000, 1_000_000):
        model = deepnvme.stream(module, weights=tmp_path / "weights.safetensors", memory=memory)
        assert torch.equal(model(question), expected)
        model.streaming.close()


def test_weights_that_are_tied_are_in_memory_once(saved: plain_module.Saved) -> None:
    # With this much memory the embedding is loaded whole, and so is the head.
    model = saved.stream(memory=10_000_000)
    units = model.streaming.layer_cache
    assert [[twin.name for twin in group.aliases] for group in units.groups if group.aliases] == [["head"]]
    for _ in range(3):
        assert torch.equal(model(saved.question), saved.answer)
    stats = model.streaming.stats()
    # The file contains the shared weight once.
    once, pages = saved.path.stat().st_size, 4096 * (len(units.groups) + 2)
    assert stats.bytes_read < once + 2 * pages, "each came once"
    assert units.memory_bytes < once + pages
    assert stats.hits + stats.waits == 3 * (plain_module.DEPTH + 2)
    model.streaming.close()
    assert model.head.weight is model.embed.weight
