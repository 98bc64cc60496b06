"""State dicts of offloaded modules: hooks, ties, answers of ``load_state_dict``, and states that cannot be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme

from .test_training import MEMORY, Model
from .test_unusual_modules import WIDTH, linears, tie

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def renamed(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    for name in [*state]:
        state["model." + name] = state.pop(name)


def doubled(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in [*state]:
        if name.startswith(prefix):
            state[name] = state[name] * 2


@pytest.mark.parametrize("hook", [renamed, doubled])
@pytest.mark.parametrize("of", ["model", "layer"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_state_dicts_see_values(tmp_path: Path, hook: Callable[..., None], of: str, when: str) -> None:
    model, expected = linears(), linears()
    pairs = [(one, one.layers[1]) for one in (expected, model)]
    hooked_modules: list[Any] = [expected, model] if of == "model" else [pairs[0][1], pairs[1][1]]
    hooked_modules[0].register_state_dict_post_hook(hook)
    if when == "before":
        hooked_modules[1].register_state_dict_post_hook(hook)
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    if when == "after":
        hooked_modules[1].register_state_dict_post_hook(hook)
    for one, other in ((model, expected), (pairs[1][1], pairs[0][1])):
        state, wanted = one.state_dict(), other.state_dict()
        assert [*state] == [*wanted]
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    model.offloading.close()  # type: ignore[operator, union-attr]


def test_a_state_dict_of_tied_parameters_shares_their_copies(tmp_path: Path) -> None:
    model = linears()
    tie(model)
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    first, second = model.state_dict(), model.state_dict()
    assert first["layers.0.weight"].data_ptr() == first["layers.3.weight"].data_ptr()
    assert first["layers.0.weight"].data_ptr() != second["layers.0.weight"].data_ptr()
    model.offloading.close()  # type: ignore[operator, union-attr]


def test_load_hooks_see_the_whole_state(tmp_path: Path) -> None:
    model, expected = linears(), linears()

    def rename(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [*state]:
            if name.startswith(prefix + "old"):
                state[prefix + "layers" + name.removeprefix(prefix + "old")] = state.pop(name)

    def double(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] * 2

    torch.manual_seed(5)
    state = {"old" + name.removeprefix("layers"): torch.randn_like(one) for name, one in expected.state_dict().items()}
    for one in (model, expected):
        untyped: Any = one
        untyped.register_load_state_dict_pre_hook(rename)
        untyped.layers[1].register_load_state_dict_pre_hook(double)
    expected.load_state_dict(state)
    offloading = deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    offloading.load_state_dict(state)
    offloading.close()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)


class WithState(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(64, 64)
        self.register_buffer("counter", torch.zeros(3))


def test_load_state_dict_answers_as_torch_does(tmp_path: Path) -> None:
    plain, model = WithState(), WithState()
    offloading = deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    whole = plain.state_dict()
    parts = {name: tensor for name, tensor in whole.items() if not name.startswith(("blocks.1", "extra", "head"))}
    parts = {**parts, "unknown.b": torch.ones(1), "unknown.a": torch.ones(1)}
    for state in (whole, parts, {name: tensor for name, tensor in whole.items() if name != "counter"}):
        answer, expected = offloading.load_state_dict(state, strict=False), plain.load_state_dict(state, strict=False)
        assert answer.missing_keys == expected.missing_keys
        assert answer.unexpected_keys == expected.unexpected_keys
        assert type(answer) is type(expected)
    assert repr(offloading.load_state_dict(whole)) == "<All keys matched successfully>"


def test_a_state_that_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    model = linears()
    offloading = deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    before = model.state_dict()
    for wrong in (torch.ones(WIDTH, device="meta"), "text"):
        state: dict[str, Any] = {name: value * 2 for name, value in before.items()} | {"layers.3.bias": wrong}
        with pytest.raises((RuntimeError, TypeError), match=r"layers\.3\.bias is"):
            offloading.load_state_dict(state)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    offloading.close()
