"""Lazy tensors in functions that bypass ``__torch_function__``, and lazy parameters in modules."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from bypasses import BYPASSES, needs_refusals, scripted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

W = torch.arange(12, dtype=torch.float32).view(3, 4)
X = torch.ones(2, 4)


def lazy_tensor(tmp_path: Path) -> Any:
    deepnvme.save({"w": W}, tmp_path / "x.pt")
    return deepnvme.load(tmp_path / "x.pt", lazy=True)["w"]


READS: dict[str, Callable[[Any], Any]] = BYPASSES | {
    "Tensor": torch.Tensor,
    "no override": lambda w: torch._C._disabled_torch_function_impl(torch.add, (), (w, 1), {}),
    "script": scripted,
    "a map": torch.func.vmap(torch.sum),
    "nested": lambda w: torch.nested.nested_tensor([w]),
    "new_tensor": lambda w: torch.ones(1).new_tensor(w),
}


@needs_refusals
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_bypass_is_refused_with_the_remedy(tmp_path: Path, name: str, is_read: bool) -> None:
    lazy = lazy_tensor(tmp_path)
    if is_read:
        lazy.sum()
    with pytest.raises(RuntimeError, match=r"a lazy tensor of shape \(3, 4\).*materialize\(\)"):
        READS[name](lazy)
    READS[name](lazy.materialize())
    assert torch.equal(lazy, W)


def layer_of(tmp_path: Path) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    deepnvme.save(plain.state_dict(), tmp_path / "layer.pt")
    layer = nn.Linear(4, 3)
    layer.load_state_dict(deepnvme.load(tmp_path / "layer.pt", lazy=True), assign=True)
    return plain, layer


def copied_by_torch(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": copied_by_torch,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_module_has_parameters(tmp_path: Path, name: str) -> None:
    plain, layer = layer_of(tmp_path)
    made = COPIES[name](layer)
    assert [type(parameter) for parameter in made.parameters()] == [nn.Parameter, nn.Parameter]
    made(X).sum().backward()
    assert made.weight.grad is not None
    assert layer.weight.grad is None
    assert torch.equal(made(X), plain(X))


COMPILERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": lambda module: torch.compile(module, backend="eager"),
    "export": lambda module: torch.export.export(module, (X,)).module(),
    "functional_call": lambda module: (
        lambda x: torch.func.functional_call(module, dict(module.named_parameters()), (x,))
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPILERS)
def test_a_module_is_compiled_with_its_values(tmp_path: Path, name: str) -> None:
    plain, layer = layer_of(tmp_path)
    assert torch.equal(COMPILERS[name](layer)(X), plain(X))


@needs_refusals
@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_gets_the_error(tmp_path: Path) -> None:
    _, layer = layer_of(tmp_path)
    with pytest.raises(RuntimeError, match=r"a lazy tensor of shape.*materialize\(\)"):
        torch.jit.script(layer)(X)


def test_a_lazy_parameter_is_a_parameter(tmp_path: Path) -> None:
    given = nn.Parameter(torch.ones(3), requires_grad=False)
    deepnvme.save({"bias": given, "rest": nn.Parameter(W.clone())}, tmp_path / "x.pt")
    state = deepnvme.load(tmp_path / "x.pt", lazy=True)
    layer = nn.Linear(4, 3)
    assert isinstance(state["bias"], nn.Parameter)
    assert "read=False" in repr(state["bias"])
    layer.bias, layer.weight = state["bias"], state["rest"]
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
    assert not layer.bias.requires_grad
    layer(X).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer(X), nn.functional.linear(X, W, torch.ones(3)))
    assert type(copy.deepcopy(layer).bias) is nn.Parameter
    assert isinstance(nn.ParameterList([state["rest"]])[0], nn.Parameter)
