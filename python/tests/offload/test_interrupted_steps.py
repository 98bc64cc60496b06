"""Ctrl-C at every point of a step of an attached optimizer: its param groups are whole wherever it is handled."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme import optim

if TYPE_CHECKING:
    from pathlib import Path

# If a generator is discarded, Python swallows the interrupt and reports it. Nothing was interrupted then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

POINTS = 120


class Wrapper(torch.optim.Optimizer):
    """Shares the dicts of its param groups with another optimizer, as accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


KINDS: dict[str, Any] = {
    "ours": lambda groups, _: optim.AdamW(groups, lr=0.01),
    "ours, on disk": lambda groups, folder: optim.AdamW(groups, lr=0.01, swap_dir=folder, memory="1MB"),
    "torch's": lambda groups, _: torch.optim.AdamW(groups, lr=0.01),
    "wrapped": lambda groups, _: Wrapper(torch.optim.AdamW(groups, lr=0.01)),
}


def model_of(folder: Path) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    return model, deepnvme.offload_parameters(model, memory="16KB", swap_dir=folder)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]


def backward(model: nn.Module, seed: int = 0) -> None:
    torch.set_grad_enabled(True)
    model(torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_param_groups_are_whole(tmp_path: Path, interrupted: Any, kind: str, in_backward: bool) -> None:
    model, offloading = model_of(tmp_path)
    optimizer = KINDS[kind](groups_of(model), tmp_path)
    offloading.attach(optimizer, in_backward=in_backward)
    for seed in range(2):
        backward(model, seed)
        with interrupted() as points:
            optimizer.step()
        optimizer.zero_grad()
    lists = [group["params"] for group in optimizer.param_groups]
    params = [list(one) for one in lists]
    stopped = 0
    for point in range(1, points.count + 1, max(points.count // POINTS, 1)):
        backward(model, point)
        try:
            with interrupted(point):
                optimizer.step()
        except KeyboardInterrupt:
            stopped += 1
        where = f"interrupted at point {point} of {points.count}"
        for group, known, own in zip(optimizer.param_groups, lists, params, strict=True):
            assert group["params"] is known, where
            assert list(map(id, known)) == list(map(id, own)), where
        if not getattr(optimizer, "has_unfinished_step", False):
            assert len(optimizer.state_dict()["state"]) == 8, where
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters()), where
        if in_backward:
            # The backward pass has begun the step.
            optimizer.step()
    assert stopped > 20
    # The steps after it are whole as well. The first pass releases what an interrupt left in memory.
    backward(model)
    optimizer.step()
    before = [param.clone() for param in model.state_dict().values()]
    backward(model, 1)
    optimizer.step()
    for one, other in zip(before, model.state_dict().values(), strict=True):
        assert not torch.equal(one, other)


def test_an_interrupted_end_of_a_step_leaves_no_mark(tmp_path: Path, interrupted: Any) -> None:
    """After a close, each step changes all parameters: it is no part of the interrupted one."""

    def begin() -> tuple[nn.Module, Any, optim.AdamW]:
        model, offloading = model_of(tmp_path)
        optimizer = optim.AdamW(groups_of(model), lr=0.01)
        offloading.attach(optimizer)
        backward(model)
        return model, offloading, optimizer

    _, offloading, optimizer = begin()
    with interrupted() as points:
        optimizer.step()
    offloading.close()
    for point in range(points.count - 40, points.count + 1):
        model, offloading, optimizer = begin()
        with suppress(KeyboardInterrupt), interrupted(point):
            optimizer.step()
        offloading.close()
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step + 1)
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            for one, param in zip(before, model.parameters(), strict=True):
                assert not torch.equal(one, param), f"step {step}, interrupted at point {point} of {points.count}"


def test_parameters_that_are_added_after_the_backward_pass(tmp_path: Path) -> None:
    """A step that the backward pass has begun changes them as well."""
    model, offloading = model_of(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offloading.attach(optimizer, in_backward=True)
    backward(model)
    added = nn.Parameter(torch.ones(3))
    added.grad = torch.ones(3)
    optimizer.add_param_group({"params": [added]})
    optimizer.step()
    assert torch.equal(added, torch.full((3,), 0.9))
    assert [len(group["params"]) for group in optimizer.param_groups] == [8, 1]
