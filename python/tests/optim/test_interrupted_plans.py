"""Ctrl-C at any point of a step, a new param group or a close: the next call does what is left, and skips nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme import optim

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

POINTS = 150


def made(folder: Path, **settings: Any) -> tuple[list[nn.Parameter], optim.AdamW]:
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(size)) for size in (1000, 30, 7)]
    optimizer = optim.AdamW(params, lr=0.1, swap_dir=folder, memory="1MB", **settings)
    backward(params, 1)
    optimizer.step()
    optimizer.zero_grad()
    return params, optimizer


def backward(params: list[nn.Parameter], seed: int) -> None:
    # torch does not restore the mode if Ctrl-C comes while it does.
    torch.set_grad_enabled(True)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(())
    for param in params:
        total = total + (param * torch.randn(param.shape, generator=generator)).sum()
    total.backward()  # type: ignore[no-untyped-call]


def loaded(optimizer: optim.AdamW, _folder: Path) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def loaded_from_a_file(optimizer: optim.AdamW, folder: Path) -> None:
    optimizer.save_state(folder / "state.safetensors")
    optimizer.load_state(folder / "state.safetensors")


def reordered(optimizer: optim.AdamW, _folder: Path) -> None:
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize("change", [loaded, loaded_from_a_file, reordered])
def test_a_step_with_a_new_plan(tmp_path: Path, interrupted: Any, change: Callable[[optim.AdamW, Path], None]) -> None:
    def begin() -> tuple[list[nn.Parameter], optim.AdamW]:
        params, optimizer = made(tmp_path)
        change(optimizer, tmp_path)
        backward(params, 2)
        return params, optimizer

    expected, optimizer = begin()
    with interrupted() as points:
        optimizer.step()
    stopped = 0
    for point in range(1, points.count + 1, max(points.count // POINTS, 1)):
        params, optimizer = begin()
        before = [param.detach().clone() for param in params]
        try:
            with interrupted(point):
                optimizer.step()
        except KeyboardInterrupt:
            stopped += 1
            is_untouched = all(torch.equal(one, other) for one, other in zip(params, before, strict=True))
            if optimizer.has_unfinished_step or is_untouched:
                optimizer.step()
        for one, other in zip(params, expected, strict=True):
            assert torch.equal(one, other), f"interrupted at point {point} of {points.count}"
        optimizer.close()
    assert stopped > POINTS // 2


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_a_new_param_group(tmp_path: Path, interrupted: Any, swap_gradients: bool) -> None:
    def add(optimizer: optim.AdamW) -> list[nn.Parameter]:
        more = [nn.Parameter(torch.randn(10)) for _ in range(3)]
        optimizer.add_param_group({"params": more})
        return more

    _, optimizer = made(tmp_path, swap_gradients=swap_gradients)
    with interrupted() as points:
        add(optimizer)
    for point in range(1, points.count + 1):
        params, optimizer = made(tmp_path, swap_gradients=swap_gradients)
        try:
            with interrupted(point):
                add(optimizer)
        except KeyboardInterrupt:
            pass
        every = [param for group in optimizer.param_groups for param in group["params"]]
        before = [param.detach().clone() for param in every]
        backward(every, 2)
        optimizer.step()
        for one, other in zip(every, before, strict=True):
            assert not torch.equal(one, other), f"interrupted at point {point} of {points.count}"
        assert params[0] is every[0]
        optimizer.close()


def test_a_close_leaves_no_hooks(tmp_path: Path, interrupted: Any) -> None:
    _, optimizer = made(tmp_path, swap_gradients=True)
    with interrupted() as points:
        optimizer.close()
    for point in range(1, points.count + 1):
        params, optimizer = made(tmp_path, swap_gradients=True)
        try:
            with interrupted(point):
                optimizer.close()
        except KeyboardInterrupt:
            optimizer.close()
        backward(params, 2)
        other = torch.optim.AdamW(params)
        other.step()
        assert all(type(param.grad) is torch.Tensor for param in params), f"point {point} of {points.count}"
