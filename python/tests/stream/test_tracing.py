"""``torch.compile`` works over weights that are on disk. Recorders and transforms are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import deepnvme
from deepnvme.errors import UnsupportedError

from . import plain_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("of", ["model", "layers"])
def test_a_compiled_model_computes_the_same(saved: plain_module.Saved, backend: str, of: str) -> None:
    model = saved.stream()
    with torch.no_grad():
        if of == "model":
            compiled: Any = torch.compile(model, backend=backend)
        else:
            for layer in model.layers:
                layer.compile(backend=backend)
            compiled = model
        for _ in range(3):
            assert torch.equal(compiled(saved.question), saved.answer)
        assert torch.equal(model(saved.question), saved.answer)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", ["compile", "offload"])
def test_a_compiled_model_with_offloaded_parameters(tmp_path: Path, backend: str, first: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    question = torch.randn(3, 64)
    expected = model(question)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend=backend) if first == "compile" else None
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    compiled = compiled or torch.compile(model, backend=backend)
    for _ in range(2):
        model.zero_grad()
        answer = compiled(question)  # type: ignore[no-untyped-call]
        assert torch.equal(answer, expected)
        answer.square().sum().backward()
        assert all(torch.equal(one.grad, other) for one, other in zip(model.parameters(), gradients, strict=True))
    model.offloading.close()
    torch._dynamo.reset()


def under_fake_tensors(model: nn.Module, question: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(question)


def called_with(model: nn.Module, weights: dict[str, torch.Tensor], question: torch.Tensor) -> torch.Tensor:
    return functional_call(model, weights, (question,)).sum()  # type: ignore[no-any-return]


RECORDERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "fake tensors": under_fake_tensors,
    "export": lambda model, question: torch.export.export(model, (question,)),
    "trace": torch.jit.trace,
    "make_fx": lambda model, question: make_fx(model)(question),
    "vmap": lambda model, question: torch.func.vmap(model)(question[None]),
    "gradients of the weights": lambda model, question: torch.func.grad(
        lambda weights: called_with(model, weights, question)
    )(dict(model.named_parameters())),
    "jvp of the weights": lambda model, question: torch.func.jvp(
        lambda weights: called_with(model, weights, question), *[(dict(model.named_parameters()),)] * 2
    ),
    "functionalize": lambda model, question: torch.func.functionalize(model)(question),
}


@pytest.mark.parametrize("name", RECORDERS)
def test_a_streamed_model_is_not_recorded(saved: plain_module.Saved, name: str) -> None:
    model = saved.stream()
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises((RuntimeError, UnsupportedError), match="on disk"):
                RECORDERS[name](model, saved.question)
        assert torch.equal(model(saved.question), saved.answer)


def test_torch_fx_calls_the_layers_of_a_streamed_model(saved: plain_module.Saved) -> None:
    model = saved.stream()
    traced = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(traced(saved.question), saved.answer)


@pytest.mark.parametrize("name", [*RECORDERS, "gradients of the inputs", "hessian"])
def test_an_offloaded_model_is_not_recorded(tmp_path: Path, name: str) -> None:
    recorders = RECORDERS | {
        "gradients of the inputs": lambda model, question: torch.func.grad(lambda x: model(x).sum())(question),
        "hessian": lambda model, question: torch.func.hessian(lambda x: model(x).square().sum())(question),
    }
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    question = torch.randn(3, 64, requires_grad=True)
    model(question).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    for _ in range(2):
        with pytest.raises((RuntimeError, UnsupportedError), match="on disk"):
            recorders[name](model, question)
    model.zero_grad()
    model(question).square().sum().backward()
    assert all(torch.equal(one.grad, other) for one, other in zip(model.parameters(), gradients, strict=True))
    model.offloading.close()


def test_batched_and_forward_mode_derivatives_of_an_offloaded_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    question = torch.randn(64)

    def derivatives() -> list[torch.Tensor]:
        batched = torch.autograd.grad(model(question), [*model.parameters()], torch.eye(64), is_grads_batched=True)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(question, question)  # type: ignore[no-untyped-call]
            forward = forward_ad.unpack_dual(model(dual)).tangent  # type: ignore[no-untyped-call]
        jacobian = torch.autograd.functional.jacobian
        return [*batched, forward, jacobian(model, question), jacobian(model, question, vectorize=True)]  # type: ignore[no-untyped-call]

    expected = derivatives()
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=tmp_path)
    for one, other in zip(derivatives(), expected, strict=True):
        torch.testing.assert_close(one, other)
    model.offloading.close()


@pytest.mark.parametrize("name", ["layers.3.weight", "embed.weight", "layers.2.bias"])
@pytest.mark.parametrize("new", ["parameter", "nothing", "data"])
def test_an_assignment_is_never_ignored(saved: plain_module.Saved, name: str, new: str) -> None:
    model = saved.stream()
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    shape = getattr(module, attribute).shape
    value = nn.Parameter(torch.rand(shape), requires_grad=False) if new == "parameter" else None
    with torch.no_grad():
        if new == "data":
            with pytest.raises(RuntimeError, match=rf"{name} is on disk.* an assignment of data"):
                getattr(module, attribute).data = torch.rand(shape)
            assert torch.equal(model(saved.question), saved.answer)
            return
        setattr(module, attribute, value)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"{name} was replaced while it is streamed.*close\(\) first"):
                model(saved.question)
    model.streaming.close()
    assert getattr(module, attribute) is value


@pytest.mark.parametrize(
    "use",
    [
        lambda model, _: model.share_memory(),
        lambda model, _: model.layers[0].weight.share_memory_(),
        lambda model, _: np.from_dlpack(model.layers[0].weight.detach()),
        lambda model, _: torch.utils.dlpack.from_dlpack(model.layers[0].weight),
        lambda model, path: save_file(model.state_dict(), path),
    ],
)
def test_memory_that_is_not_there_is_not_given_out(saved: plain_module.Saved, tmp_path: Path, use: Any) -> None:
    model = saved.stream()
    with pytest.raises(RuntimeError, match="is on disk"):
        use(model, tmp_path / "saved.safetensors")
    with torch.no_grad():
        assert torch.equal(model(saved.question), saved.answer)
    assert model.to("cpu") is model
