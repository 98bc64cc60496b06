"""Nested states with lazy tensors."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme._checkpoint.lazy import LazyTensor

from .states import DTYPES, assert_same, everything, random


def read_all(value: Any) -> Any:
    """Replace the lazy tensors of a state by real ones: dicts are changed in place, other containers are rebuilt."""
    if isinstance(value, LazyTensor):
        return value.materialize()
    if type(value) in (list, tuple):
        return type(value)(read_all(element) for element in value)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = read_all(value[key])
    return value


def count_unread(value: Any) -> int:
    """Count the lazy tensors that have not been read."""
    if isinstance(value, LazyTensor):
        return int("read=False" in repr(value))
    children = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return sum(count_unread(child) for child in children)


@pytest.mark.filterwarnings("ignore")  # torch warns of sparse CSR, quantised tensors and typed storages
def test_everything_is_where_it_was(tmp_path: Path) -> None:
    deepnvme.save(everything(), tmp_path / "x.pt")
    expected, lazy = deepnvme.load(tmp_path / "x.pt"), deepnvme.load(tmp_path / "x.pt", lazy=True)
    assert count_unread(lazy) > 30
    assert_same(read_all(lazy), expected)


def test_nothing_is_read_before_it_is_used(tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 1000)
    state = {"model": model.state_dict(), "parameter": model.weight, "step": 5, "list": [torch.randn(1 << 20), "x"],
             "types": [random((7, 3), dtype) for dtype in DTYPES]}  # fmt: skip
    deepnvme.save(state, tmp_path / "x.pt")
    with deepnvme.Engine() as engine:
        lazy = deepnvme.load(tmp_path / "x.pt", lazy=True, engine=engine)
        opened = engine.stats().bytes_read
        assert opened < 1 << 20
        assert count_unread(lazy) == 4 + len(DTYPES)
        assert (lazy["step"], lazy["list"][1]) == (5, "x")
        assert type(lazy["model"]) is OrderedDict
        assert lazy["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
        assert lazy["parameter"].shape == (1000, 1000)
        assert engine.stats().bytes_read == opened
        assert torch.equal(lazy["model"]["bias"], model.bias)
        assert count_unread(lazy) == 3 + len(DTYPES)
        assert engine.stats().bytes_read < opened + (1 << 20)
        assert type(lazy["parameter"].materialize()) is torch.nn.Parameter
        assert_same(read_all(lazy), state)


def test_tensors_that_share_memory_share_it(tmp_path: Path) -> None:
    base = torch.zeros(100, 100)
    deepnvme.save({"a": base, "b": base[3:], "same": [base, base]}, tmp_path / "x.pt")
    lazy = deepnvme.load(tmp_path / "x.pt", lazy=True)
    assert lazy["same"][0] is lazy["same"][1] is lazy["a"]
    lazy["a"].fill_(1)
    assert lazy["b"].sum() == 9700


def test_only_some_of_a_nested_state(tmp_path: Path) -> None:
    state = {"model": {"a": torch.randn(3), "b": torch.randn(4)}, "optimizer": [torch.randn(2)], "step": 5}
    deepnvme.save(state, tmp_path / "x.pt")
    lazy = deepnvme.load(tmp_path / "x.pt", lazy=True, only="model.a")
    assert_same(read_all(lazy), deepnvme.load(tmp_path / "x.pt", only="model.a"))
    for suffix in ("pt", "safetensors"):
        deepnvme.save({"a": torch.ones(1)}, tmp_path / f"y.{suffix}")
        with pytest.raises(KeyError, match="other"):
            deepnvme.load(tmp_path / f"y.{suffix}", lazy=True, only="other")


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_several_files(tmp_path: Path, suffix: str) -> None:
    state = {f"layer.{index}": torch.randn(10) for index in range(4)}
    stem = "pytorch_model" if suffix == "bin" else "model"
    weight_map = {}
    for index, name in enumerate(state):
        file = f"{stem}-{index}.{suffix}"
        deepnvme.save({name: state[name]}, tmp_path / file)
        weight_map[name] = file
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    lazy = deepnvme.load(tmp_path, lazy=True)
    assert count_unread(lazy) == 4
    assert_same(read_all(lazy), state)


def test_a_model_and_an_optimizer_go_on(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 5)).pow(2).sum().backward()
        optimizer.step()

    first, second = made(), made()
    step(*first)
    deepnvme.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, tmp_path / "x.pt")
    lazy = deepnvme.load(tmp_path / "x.pt", lazy=True)
    second[0].load_state_dict(lazy["model"])
    second[1].load_state_dict(lazy["optimizer"])
    step(*first)
    step(*second)
    assert_same(dict(second[0].state_dict()), dict(first[0].state_dict()))
