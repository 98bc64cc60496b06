"""The options of torch's optimizers, in memory and on disk, compared with torch's loops and its `foreach`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme import optim

from .conftest import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 12
MEMORY = 64 << 10
# The third has other strides, the fourth sometimes no gradient, and the fifth never one.
SHAPES = [(130, 51), (7,), (8, 3, 3, 3), (60, 100), (9,)]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0}),
    ("AdamW", {"amsgrad": True, "maximize": True, "weight_decay": 0.3}),
    ("AdamW", {"lr": "tensor"}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.2, "maximize": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.2, "betas": (0.0, 0.5)}),
    ("Adam", {"weight_decay": 0.2, "decoupled_weight_decay": True}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    ("SGD", {"lr": 1e-2, "momentum": 0.8, "dampening": 0.4, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 1e-2, "momentum": 0.7, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": "tensor", "momentum": 0.7}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3}),
    ("Adagrad", {"maximize": True, "lr": "tensor"}),
]
WHERE = {"in memory": False, "on disk": True}


def words_of(case: Any) -> str | None:
    if isinstance(case, dict):
        return "-".join(f"{key}={value}" for key, value in case.items()) or "default"
    return None


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(1)
    made = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


def optimizer(kind: Any, params: list[nn.Parameter], settings: dict[str, Any], **more: Any) -> Any:
    settings = dict(settings)
    if settings.get("lr") == "tensor":
        settings["lr"] = torch.tensor(3e-3)
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.05}]
    return kind(groups, **settings, **more)


def run(params: list[nn.Parameter], one: Any, steps: int = STEPS, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        for place, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator) * 10.0 ** (step % 3 - 1) * scale
            skipped = place == 4 or (place == 3 and step % 3 == 1)
            param.grad = None if skipped else grad.to(param.dtype)
        one.step()


@pytest.mark.parametrize("on_disk", WHERE.values(), ids=WHERE.keys())
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=words_of)
def test_compared_with_torch(tmp_path: Path, kind: str, settings: dict[str, Any], on_disk: bool) -> None:
    ours, theirs = parameters(), parameters()
    where = {"swap_dir": tmp_path, "memory": MEMORY} if on_disk else {}
    mine = optimizer(getattr(optim, kind), ours, settings, **where)
    his = optimizer(getattr(torch.optim, kind), theirs, settings, foreach=False)
    run(ours, mine)
    run(theirs, his)
    for mine_one, his_one in zip(ours, theirs, strict=True):
        if kind == "AdamW" and settings.get("lr") == "tensor":
            # torch then computes the decay in fp32, and otherwise in double precision.
            torch.testing.assert_close(mine_one, his_one, rtol=1e-6, atol=1e-6)
        else:
            assert_same(mine_one.detach(), his_one.detach())
        assert mine_one.stride() == his_one.stride()
    state, expected = mine.state_dict()["state"], his.state_dict()["state"]
    for index, kept in expected.items():
        for called, value in kept.items():
            if value is not None:
                assert_same(torch.as_tensor(state[index][called]), torch.as_tensor(value), f"{index} {called}")
    # torch's `foreach` multiplies and divides in another order, so it rounds differently.
    if settings.get("lr") != "tensor":  # `foreach` refuses a tensor as the rate
        quick = parameters()
        run(quick, optimizer(getattr(torch.optim, kind), quick, settings, foreach=True))
        for mine_one, quick_one in zip(ours, quick, strict=True):
            torch.testing.assert_close(mine_one, quick_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_bf16_parameters_stay_close_to_torchs(tmp_path: Path, kind: str) -> None:
    """torch rounds parameters and moments to bf16 in each step. Here they are fp32, so the last bits differ."""
    settings = {"lr": 1e-2, "momentum": 0.9} if kind == "SGD" else {"lr": 1e-2}
    params = [parameters(torch.bfloat16) for _ in range(3)]
    run(params[0], optimizer(getattr(optim, kind), params[0], settings, swap_dir=tmp_path, memory=MEMORY))
    run(params[1], optimizer(getattr(optim, kind), params[1], settings))
    run(params[2], optimizer(getattr(torch.optim, kind), params[2], settings, foreach=False))
    for disk, memory, his in zip(*params, strict=True):
        assert torch.equal(disk, memory)
        # Each step rounds a bf16 number below 4 by at most 2^-7.
        torch.testing.assert_close(disk.float(), his.float(), rtol=0, atol=STEPS * 2.0**-7)


@pytest.mark.parametrize("on_disk", ["nothing", "state", "state and parameters"])
def test_a_scaler_and_closures(tmp_path: Path, on_disk: str) -> None:
    torch.manual_seed(3)
    inputs = torch.randn(16, 80)

    def make() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(80, 90), nn.Tanh(), nn.Linear(90, 5))

    where: dict[str, Any] = {} if on_disk == "nothing" else {"swap_dir": tmp_path, "memory": MEMORY}
    found = []
    for kind, options in ((optim.AdamW, where), (torch.optim.AdamW, {"foreach": False})):
        model = make()
        one: Any = kind(model.parameters(), lr=1e-2, **options)
        if kind is optim.AdamW and on_disk == "state and parameters":
            deepnvme.offload_parameters(model, memory=40_000, swap_dir=tmp_path).attach(one)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for step in range(10):
            one.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            if step == 4:
                grad = model[0].weight.grad
                assert isinstance(grad, torch.Tensor)
                grad[3, 3] = float("nan")
            scaler.step(one)
            scaler.update()

        def closure(model: nn.Sequential = model, one: Any = one) -> torch.Tensor:
            one.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses = [one.step(closure).item() for _ in range(5)]
        assert losses[-1] < losses[0]
        found.append((model, scaler.get_scale()))
    (mine, scale), (his, expected_scale) = found
    assert scale == expected_scale
    for name, tensor in his.state_dict().items():
        assert_same(mine.state_dict()[name], tensor, name)


def sparse() -> nn.Parameter:
    param = nn.Parameter(torch.ones(400, 100))
    nn.functional.embedding(torch.tensor([1, 2]), param, sparse=True).sum().backward()  # type: ignore[no-untyped-call]
    return param


def complex_numbers() -> nn.Parameter:
    param = nn.Parameter(torch.ones(5, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    return param


def double() -> nn.Parameter:
    param = nn.Parameter(torch.ones(5, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    return param


def good() -> nn.Parameter:
    param = nn.Parameter(torch.ones(5000))
    param.grad = torch.ones_like(param)
    return param


@pytest.mark.parametrize("on_disk", WHERE.values(), ids=WHERE.keys())
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.SGD, optim.Adagrad])
@pytest.mark.parametrize(
    ("bad", "settings", "words"),
    [
        (sparse, {}, "sparse=False, or give"),
        (complex_numbers, {}, "complex64"),
        (double, {}, "float64"),
        (good, {"differentiable": True}, r"torch\.optim"),
    ],
)
def test_a_refusal_changes_nothing(
    tmp_path: Path, kind: Any, bad: Callable[[], nn.Parameter], settings: dict[str, Any], words: str, *, on_disk: bool
) -> None:
    where = {"swap_dir": tmp_path, "memory": MEMORY} if on_disk else {}
    params = [good(), bad(), good()]
    before = [param.detach().clone() for param in params]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
        kind(params, **settings, **where).step()
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.detach(), old)
