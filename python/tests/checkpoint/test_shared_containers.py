"""States with a container in several places, within itself, or very deep: each tensor has all of its names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.errors import InvalidArgumentError, UnsupportedError

Save = Callable[[Any, Path], object]

SAVES = [pytest.param(deepnvme.save, id="deepnvme.save"), pytest.param(torch.save, id="torch.save")]
NAMES = ["best.bias", "best.weight", "model.bias", "model.weight"]


def shared_dict() -> dict[str, Any]:
    inner = {"weight": torch.randn(3, 4), "bias": torch.randn(5)}
    return {"model": inner, "best": inner}


def shared_parameters() -> dict[str, Any]:
    """Tied weights, as `named_parameters(remove_duplicate=False)` lists them."""
    weight, bias = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))
    return {"model.weight": weight, "model.bias": bias, "best.weight": weight, "best.bias": bias}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("state_of", [shared_dict, shared_parameters])
def test_each_name_is_there(tmp_path: Path, save: Save, state_of: Callable[[], dict[str, Any]]) -> None:
    path, state = tmp_path / "state.pt", state_of()
    save(state, path)
    flat = {
        f"{key}.{name}" if isinstance(value, dict) else key: tensor
        for key, value in state.items()
        for name, tensor in (value.items() if isinstance(value, dict) else [("", value)])
    }
    assert sorted(flat) == NAMES
    # By name: the command, patterns, and filling the state that was saved.
    command = [sys.executable, "-m", "deepnvme", "convert", str(path), str(tmp_path / "state.safetensors")]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    converted = deepnvme.load(tmp_path / "state.safetensors")
    assert {name: tensor.tolist() for name, tensor in converted.items()} == {
        name: tensor.tolist() for name, tensor in flat.items()
    }
    only = deepnvme.load(path, only="best")
    assert torch.equal(only["best"]["weight"] if "best" in only else only["best.weight"], flat["best.weight"])
    expected = {name: tensor.detach().clone() for name, tensor in flat.items()}
    with torch.no_grad():
        for tensor in flat.values():
            tensor.zero_()
    deepnvme.load(path, into=state)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in flat.items())
    with deepnvme.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, state)
        assert checkpointer.restore(into=state) is not None


def test_a_state_that_contains_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.arange(3.0)}
    state["self"] = [state, torch.arange(4.0)]
    path = tmp_path / "state.pt"
    deepnvme.save(state, path)
    state["a"].zero_()
    deepnvme.load(path, into=state)
    assert torch.equal(state["a"], torch.arange(3.0))
    with deepnvme.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, state)


def test_containers_that_refer_to_each_other_without_end(tmp_path: Path) -> None:
    """Forty lists, each with the one before it twice: saved in no time, and refused where tensors need names."""
    state: Any = [torch.ones(2)]
    for _ in range(40):
        state = [state, state]
    path = tmp_path / "state.pt"
    deepnvme.save(state, path)
    with deepnvme.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, state)
    with pytest.raises((InvalidArgumentError, UnsupportedError), match="refer to each other more than"):
        deepnvme.load(path, into=state)
    # Without tensors there is nothing to name.
    state = ["text"]
    for _ in range(40):
        state = [state, state]
    other, path = {"shared": state, "a": torch.arange(3.0)}, tmp_path / "other.pt"
    deepnvme.save(other, path)
    deepnvme.load(path, into=other)


@pytest.mark.parametrize("depth", [600, 10_000])
def test_a_state_that_is_too_deep(tmp_path: Path, depth: int) -> None:
    state: Any = torch.ones(2)
    for _ in range(depth):
        state = [state]
    with deepnvme.Checkpointer(tmp_path) as checkpointer, pytest.raises(InvalidArgumentError, match="at most 500"):
        checkpointer.save(1, state)
    deepnvme.save({"a": torch.ones(2)}, tmp_path / "file.pt")
    with pytest.raises(InvalidArgumentError, match=r"too deeply.* at most 500 levels"):
        deepnvme.load(tmp_path / "file.pt", into={"a": state})
