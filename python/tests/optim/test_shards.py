"""Names of shards, and settings, that `load_state` would refuse are refused before a file is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepnvme import optim
from deepnvme.errors import InvalidArgumentError

COUNT = 100


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., tuple[list[nn.Parameter], optim.AdamW]]]:
    optimizers: list[optim.AdamW] = []

    def make(count: int = 1, steps: int = 1) -> tuple[list[nn.Parameter], optim.AdamW]:
        params = [nn.Parameter(torch.arange(float(COUNT)) + index) for index in range(count)]
        optimizer = optim.AdamW(params, lr=0.1, swap_dir=tmp_path, memory="1MB")
        optimizers.append(optimizer)
        for _ in range(steps):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        return params, optimizer

    yield make
    for one in optimizers:
        one.close()


REFUSED: dict[str, Any] = {
    "a number": (7, 0),
    "no name": (None, 0),
    "bytes": (b"a", 0),
    "a lone surrogate": ("a\ud800", 0),
    "a float": ("a", 0.0),
    "a bool": ("a", True),
    "a text": ("a", "0"),
    "negative": ("a", -5),
    "too large": ("a", 2**64),
    "too large with its elements": ("a", 2**63 - COUNT),
    "only a name": "ab",
    "a short tuple": ("a",),
    "a long tuple": ("a", 0, 0),
    "nothing": None,
    "not a whole tensor index": ("a", torch.tensor(0.5)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_shard_that_no_file_can_have(tmp_path: Path, made: Any, what: str) -> None:
    (param,), optimizer = made()
    path = tmp_path / "state"
    optimizer.save_state(path, shards={param: ("a", 0)})
    before = path.read_bytes()
    with pytest.raises(InvalidArgumentError, match=r"shards has .*it must be a tuple"):
        optimizer.save_state(path, shards={param: REFUSED[what]})
    assert path.read_bytes() == before
    with pytest.raises(InvalidArgumentError, match=r"shards has .*it must be a tuple"):
        optimizer.load_state(path, shards={param: REFUSED[what]})
    # Nothing has changed.
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("shards", [5, ["a"], [("a", 0)], "a"])
def test_shards_that_are_no_dict(tmp_path: Path, made: Any, shards: Any) -> None:
    _, optimizer = made()
    with pytest.raises(InvalidArgumentError, match=r"shards is .*it must be a dict"):
        optimizer.save_state(tmp_path / "state", shards=shards)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("first", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
@pytest.mark.parametrize("name", ["a", "", "ä.é", "pad.0", "x" * 300, np.str_("a")])
def test_integers_and_texts_of_all_kinds(tmp_path: Path, made: Any, name: str, first: Any) -> None:
    (param,), optimizer = made()
    optimizer.save_state(tmp_path / "state", shards={param: (name, first)})
    (other,), loader = made(steps=0)
    loader.load_state(tmp_path / "state", shards={other: [str(name), 3]}, verify="full")
    expected, found = optimizer.state_dict()["state"][0], loader.state_dict()["state"][0]
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("first", [0, 1, COUNT - 1])
def test_parameters_that_are_the_same_elements(tmp_path: Path, made: Any, first: int) -> None:
    (one, other), optimizer = made(2)
    with pytest.raises(InvalidArgumentError, match="two parameters for elements of 'a'"):
        optimizer.save_state(tmp_path / "state", shards={one: ("a", first), other: ("a", 0)})
    assert not (tmp_path / "state").exists()
    optimizer.save_state(tmp_path / "state", shards={one: ("a", COUNT), other: ("a", 0)})


def test_parts_of_a_tensor_with_other_step_counts(tmp_path: Path, made: Any) -> None:
    (one, other), optimizer = made(2)
    one.grad, other.grad = torch.ones_like(one), None
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match="parts of 'a' have other step counts"):
        optimizer.save_state(tmp_path / "state", shards={one: ("a", 0), other: ("a", COUNT)})
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("note", {"a": 1}), ("note", [[1]]), ("note", 2**70), ("lr", None), ("betas", (0.9,)), ("weight_decay", "x")],
)
def test_settings_that_no_load_takes(tmp_path: Path, made: Any, name: str, value: Any) -> None:
    _, optimizer = made()
    optimizer.param_groups[0][name] = value
    with pytest.raises(InvalidArgumentError, match=r"settings of a group of parameters: .* load_state would refuse"):
        optimizer.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()
