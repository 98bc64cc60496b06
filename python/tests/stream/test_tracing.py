"""``torch.compile``, ``torch.export`` and fake tensors over weights that are on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


def traced_under_fake_tensors(model: nn.Module, question: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(question)


def exported(model: nn.Module, question: torch.Tensor) -> None:
    torch.export.export(model, (question,))


@pytest.mark.parametrize("trace", [traced_under_fake_tensors, exported])
def test_a_streamed_model_is_not_traced(saved: plain_module.Saved, trace: Callable[..., Any]) -> None:
    model = saved.stream()
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises((RuntimeError, UnsupportedError), match="on disk"):
                trace(model, saved.question)
        assert torch.equal(model(saved.question), saved.answer)


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
