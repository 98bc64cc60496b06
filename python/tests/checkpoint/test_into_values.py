"""``load(into=...)`` replaces non-tensor values, and loses no tensor silently."""

from __future__ import annotations

import copy
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from deepnvme import errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "tags": ["a", ("b", 2)]}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    torch.manual_seed(1)
    state = state_of(*trained(), step=7)
    deepnvme.save(state, tmp_path / "state.pt")
    return tmp_path / "state.pt", state


def test_values_are_those_of_the_file(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 9.0
    into = state_of(model, optimizer, step=-1)
    into["tags"] = ["x", ("y", 3)]
    found = deepnvme.load(path, into=into)
    assert found is into
    assert (into["step"], into["tags"]) == (7, ["a", ("b", 2)])
    assert into["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    optimizer.load_state_dict(into["optimizer"])
    moments = state["optimizer"]["state"]
    assert all(torch.equal(optimizer.state_dict()["state"][0][key], moments[0][key]) for key in moments[0])
    assert torch.equal(model.state_dict()["weight"], state["model"]["weight"])


def test_an_empty_optimizer_state_is_refused(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    model = torch.nn.Linear(5, 3)
    into = state_of(model, torch.optim.Adam(model.parameters(), lr=9.0), step=-1)
    before = copy.deepcopy(into)
    expected = r"into\['optimizer'\]\['state'\] is empty, .* such as optimizer\.state\.0\.\w+.*load without into"
    with pytest.raises(errors.InvalidArgumentError, match=expected):
        deepnvme.load(path, into=into)
    assert into["step"] == -1
    assert all(torch.equal(into["model"][key], before["model"][key]) for key in before["model"])
    del into["optimizer"]
    assert deepnvme.load(path, into=into)["step"] == 7
    assert torch.equal(into["model"]["bias"], state["model"]["bias"])


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("make", [dict, list, tuple])
def test_an_empty_state_is_refused(tmp_path: Path, suffix: str, make: Callable[[], Any]) -> None:
    path = tmp_path / f"state.{suffix}"
    deepnvme.save({"a": torch.ones(3)}, path)
    with pytest.raises(errors.InvalidArgumentError, match="into is empty"):
        deepnvme.load(path, into=make())


def test_an_empty_container_that_is_empty_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"a": torch.ones(3), "none": {}, "some": {"lr": 3}, "other": [1, 2]}, path)
    into: dict[str, Any] = {"a": torch.zeros(3), "none": {}, "some": {}, "other": []}
    deepnvme.load(path, into=into)
    assert into.pop("a").tolist() == [1, 1, 1]
    assert into == {"none": {}, "some": {"lr": 3}, "other": [1, 2]}


def test_containers_are_changed_in_place(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"config": {"a": 1, "b": {"c": 2}}, "list": [torch.ones(2), 5, {"d": 6}]}, path)
    config, inner = {"a": 0, "b": {"c": 0}}, {"d": 0}
    into: dict[str, Any] = {"config": config, "list": [torch.zeros(2), 0, inner]}
    deepnvme.load(path, into=into)
    assert config == {"a": 1, "b": {"c": 2}}
    assert inner == {"d": 6}
    assert into["list"][1] == 5
    assert into["list"][0].tolist() == [1, 1]


def test_only_the_keys_of_into_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"a": torch.ones(1), "config": {"a": 1, "b": 2}, "more": 3}, path)
    into = {"a": torch.zeros(1), "config": {"b": 0}}
    deepnvme.load(path, into=into)
    assert into["config"] == {"b": 2}
    assert sorted(into) == ["a", "config"]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_value_that_the_file_lacks_stays_with_a_warning(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"state.{suffix}"
    deepnvme.save({"a": torch.ones(1)}, path)
    into: dict[str, Any] = {"a": torch.zeros(1), "epoch": 4}
    with pytest.warns(UserWarning, match=r"the file has no value for epoch; into keeps its own") as caught:
        deepnvme.load(path, into=into)
    assert caught[-1].filename == __file__
    assert into["epoch"] == 4
    assert into["a"].item() == 1


def test_values_that_cannot_be_replaced_stay_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"pair": (torch.ones(1), 5), "view": {"lr": 2}}, path)
    into: dict[str, Any] = {"pair": (torch.zeros(1), 0), "view": MappingProxyType({"lr": 1})}
    with pytest.warns(UserWarning, match=r"a tuple cannot be changed: pair\.1, view\.lr; into keeps its own"):
        deepnvme.load(path, into=into)
    assert into["pair"][0].item() == 1
    assert (into["pair"][1], into["view"]["lr"]) == (0, 1)


def test_a_state_in_itself(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"a": torch.ones(1), "b": 2}, path)
    into: dict[str, Any] = {"a": torch.zeros(1), "b": 0}
    into["self"] = into
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepnvme.load(path, into=into)
    assert into["b"] == 2


def test_a_refused_value_changes_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepnvme.save({"a": torch.ones(1), "path": tmp_path}, path)
    into: dict[str, Any] = {"a": torch.zeros(1), "path": None}
    with pytest.raises(errors.UnsafeFileError):
        deepnvme.load(path, into=into)
    assert into["a"].item() == 0
    # Tensors alone need no other value.
    assert deepnvme.load(path, into={"a": into["a"]})["a"].item() == 1


@pytest.mark.parametrize("value", [{}, [], (), None, 5, "text"])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("key", ["a", "b"])
def test_a_tensor_in_the_place_of_a_value_is_not_lost(tmp_path: Path, value: object, suffix: str, key: str) -> None:
    path = tmp_path / f"state.{suffix}"
    saved: dict[str, Any] = {"a": torch.ones(1), "b.c": torch.ones(1), "t": torch.ones(1)}
    if suffix == "pt":
        saved["b"] = {"c": saved.pop("b.c")}
    deepnvme.save(saved, path)
    into: dict[str, Any] = {key: value, "t": torch.zeros(1)}
    with pytest.raises(
        errors.InvalidArgumentError, match=rf"into\['{key}'\] is (empty|no tensor), and .*would be lost"
    ):
        deepnvme.load(path, into=into)
    assert into["t"].item() == 0


def test_a_container_in_two_places(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"t": torch.ones(1), "a": {"lr": 1}, "b": {"lr": 2}, "c": {"lr": 1}}, path)
    shared = {"lr": 0}
    expected = r"into\['a'\]\['lr'\] and into\['b'\]\['lr'\] are in one container"
    with pytest.raises(errors.InvalidArgumentError, match=expected):
        deepnvme.load(path, into={"t": torch.zeros(1), "a": shared, "b": shared})
    assert shared == {"lr": 0}
    deepnvme.load(path, into={"t": torch.zeros(1), "a": shared, "c": shared})
    assert shared == {"lr": 1}


def test_containers_with_tensors_that_differ_in_kind_or_length(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"long": [torch.ones(1), 1, 2], "pair": (torch.ones(1), 3), "same": (torch.ones(1), 4)}, path)
    into: dict[str, Any] = {
        "long": [torch.zeros(1), 0], "pair": [torch.zeros(1), 0], "same": (torch.zeros(1), 4)
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deepnvme.load(path, into=into)
    assert (into["long"][1], into["pair"][1], into["same"][1]) == (1, 3, 4)
    assert all(into[key][0].item() == 1 for key in into)
    with pytest.warns(UserWarning, match=r"a tuple cannot be changed: same\.1"):
        deepnvme.load(path, into={"same": (torch.zeros(1), 5)})
