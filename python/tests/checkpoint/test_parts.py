"""Partial loads: some tensors, into existing tensors, lazily, to other devices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import errors
from process_memory import memory_bytes

from .states import assert_same


@pytest.fixture(params=["pt", "safetensors"])
def flat(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = {
        f"layers.{index}.{kind}": torch.randn(50 + index, 60) for index in range(12) for kind in ("weight", "bias")
    }
    path = tmp_path / f"x.{request.param}"
    deepnvme.save(state, path)
    return path, state


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("layers.3.weight", 1),
        ("layers.1", 2),
        ("layers.1*", 6),
        ("*.bias", 12),
        (["layers.0", "*.bias"], 13),
        ("*", 24),
    ],
)
def test_only_selected_tensors_are_loaded(flat: tuple[Path, dict[str, torch.Tensor]], only: Any, count: int) -> None:
    path, state = flat
    loaded = deepnvme.load(path, only=only)
    assert len(loaded) == count
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_only_those_bytes_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    deepnvme.save({name: torch.randn(2 << 20) for name in "abcd"}, path)
    with deepnvme.Engine() as engine:
        loaded = deepnvme.load(path, only="c", engine=engine)
        assert list(loaded) == ["c"]
        assert engine.stats().bytes_read < path.stat().st_size / 3


def test_a_name_that_is_not_there_is_an_error(flat: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(KeyError, match=r"layer\.9"):
        deepnvme.load(flat[0], only="layer.9")
    with pytest.raises(KeyError, match="other"):
        deepnvme.load(flat[0], into={"other": torch.empty(1)})


def test_unselected_entries_of_a_nested_state_are_omitted(tmp_path: Path) -> None:
    state = {"model": {"a": torch.randn(3), "b": torch.randn(4)}, "optimizer": {"state": {0: {"m": torch.randn(3)}}},
             "step": 5, "list": [torch.randn(2), torch.randn(2)]}  # fmt: skip
    deepnvme.save(state, tmp_path / "x.pt")
    assert_same(deepnvme.load(tmp_path / "x.pt", only="model.a"), {"model": {"a": state["model"]["a"]}, "step": 5})  # type: ignore[index]
    loaded = deepnvme.load(tmp_path / "x.pt", only=["list.1", "optimizer"])
    assert_same(loaded, {"optimizer": state["optimizer"], "step": 5, "list": [None, state["list"][1]]})  # type: ignore[index]


def test_names_with_a_common_prefix_are_distinct(tmp_path: Path) -> None:
    keys = ["a", "a!", "a-b", "a.b", "a.b.c", "ab", "a/", "b", "", "a.", "10", "1"]
    state: dict[Any, Any] = {key: torch.randn(1) for key in keys}
    state |= {
        1: {"x": torch.randn(1), "": torch.randn(1)},
        "c": {"a": {"b": torch.randn(1)}, "a.x": torch.randn(1), "step": 5},
    }
    deepnvme.save(state, tmp_path / "x.pt")
    for only in ["a!", "a.b", "b", "10", "c.a.x", "1.x", "ab", "c"]:
        loaded = deepnvme.load(tmp_path / "x.pt", only=only)
        below = [key for key in keys if key == only or key.startswith(f"{only}.")]
        assert [key for key in keys if key in loaded] == below, only
        assert all(torch.equal(loaded[key], state[key]) for key in below)
        assert (1 in loaded, "c" in loaded) == (only == "1.x", only in {"c", "c.a.x"}), only


def test_into_tensors_that_are_there(flat: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = flat
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    assert deepnvme.load(path, into=into, verify="full") is into
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == places
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_into_memory_of_other_kinds(flat: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = flat
    names = list(state)
    base = torch.zeros(200, 200)
    into = {
        names[0]: base[:50, :60],
        names[1]: torch.zeros(60, 50).t(),
        names[2]: torch.nn.Parameter(torch.zeros(51, 60)),
    }
    deepnvme.load(path, into=into)
    assert all(torch.equal(into[name], state[name]) for name in into)
    assert base[50:].abs().sum() == 0
    doubles = {names[0]: torch.zeros(50, 60, dtype=torch.float64)}
    with pytest.raises(TypeError, match="cast=True"):
        deepnvme.load(path, into=doubles)
    deepnvme.load(path, into=doubles, cast=True)
    assert torch.equal(doubles[names[0]], state[names[0]].double())
    with pytest.raises(ValueError, match="shape"):
        deepnvme.load(path, into={names[0]: torch.zeros(60, 50)})


def test_into_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.randn(100, 10)
    deepnvme.save({"a": base[:50], "b": base[50:], "t": base.t(), "all": base, "e": torch.empty(0)}, tmp_path / "x.pt")
    into = {
        "a": torch.zeros(50, 10),
        "b": torch.zeros(50, 10),
        "t": torch.zeros(10, 100),
        "all": torch.zeros(100, 10),
        "e": torch.empty(0),
    }
    deepnvme.load(tmp_path / "x.pt", into=into, verify="full")
    assert torch.equal(into["a"], base[:50])
    assert torch.equal(into["b"], base[50:])
    assert torch.equal(into["t"], base.t())
    assert torch.equal(into["all"], base)


def test_a_model_is_filled_in_place(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)
    deepnvme.save(source.state_dict(), tmp_path / "x.pt")
    deepnvme.load(tmp_path / "x.pt", into=target.state_dict())
    assert torch.equal(source.weight, target.weight)
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    deepnvme.save({"model": source.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "y.pt")
    nested = copy.deepcopy({"model": target.state_dict(), "optimizer": optimizer.state_dict()})
    nested["optimizer"]["state"][0]["exp_avg"].zero_()
    deepnvme.load(tmp_path / "y.pt", into=nested)
    assert torch.equal(nested["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_lazy_tensors_are_read_when_used(flat: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = flat
    lazy = deepnvme.load(path, lazy=True)
    assert list(lazy) and set(lazy) == set(state)
    before = deepnvme.stats().bytes_read
    first = lazy["layers.3.weight"]
    assert first.shape == (53, 60)
    assert (first.dtype, first.device, first.dim(), first.numel()) == (torch.float32, torch.device("cpu"), 2, 3180)
    assert "read=False" in repr(first)
    assert deepnvme.stats().bytes_read == before
    assert torch.equal(first, state["layers.3.weight"])
    assert "read=True" in repr(first)
    assert torch.equal(lazy["layers.4.bias"] + 1, state["layers.4.bias"] + 1)
    assert torch.equal(
        torch.cat([first[:2], first[3:4]]), torch.cat([state["layers.3.weight"][:2], state["layers.3.weight"][3:4]])
    )
    module = torch.nn.Linear(60, 53, bias=False)
    module.load_state_dict({"weight": first})
    assert torch.equal(module.weight, state["layers.3.weight"])
    assert len(deepnvme.load(path, lazy=True, only="layers.0")) == 2


def test_the_meta_device_reads_no_tensor(flat: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = flat
    loaded = deepnvme.load(path, device="meta")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in loaded.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in state.items()
    }
    assert all(tensor.is_meta for tensor in loaded.values())


def test_arguments_that_contradict_each_other(flat: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _state = flat
    for options in ({"into": {}, "only": "a"}, {"into": {}, "lazy": True}, {"cast": True}, {"verify": "some"}):
        with pytest.raises(ValueError, match=r"combined|cast|verify"):
            deepnvme.load(path, **options)
    with pytest.raises(TypeError, match="names"):
        deepnvme.load(path, only=[1])  # type: ignore[list-item]


@pytest.mark.parametrize("lazy", [False, True])
def test_into_page_locked_memory(flat: tuple[Path, dict[str, torch.Tensor]], lazy: bool) -> None:
    path, state = flat
    before = memory_bytes("VmLck")
    loaded = deepnvme.load(path, pin_memory=True, lazy=lazy, verify="full")
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(loaded[name].clone() + 0, tensor)
    locked = memory_bytes("VmLck") - before
    trial = deepnvme.pinned_empty(1 << 20)
    if memory_bytes("VmLck") - before > locked:
        assert locked >= sum(tensor.nbytes for tensor in state.values()), "as much may be locked here"
    del loaded, trial
    for wrong in ({"into": state}, {"device": "meta"}):
        with pytest.raises(ValueError, match="pin_memory"):
            deepnvme.load(path, pin_memory=True, **wrong)


@pytest.mark.parametrize("name", ["device", "map_location"])
def test_a_device_is_refused_with_into(tmp_path: Path, name: str) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"a": torch.ones(3)}, path)
    state = {"a": torch.zeros(3)}
    meta: dict[str, Any] = {name: "meta"}
    cpu: dict[str, Any] = {name: "cpu"}
    with pytest.raises(errors.InvalidArgumentError, match=f"^{name} is for tensors that load makes.*omit {name}"):
        deepnvme.load(path, into=state, **meta)
    assert not state["a"].any()
    deepnvme.load(path, into=state, **cpu)
    assert state["a"].all()
