"""`offload_parameters` and `stream` that fail or are interrupted leave the model as it was, or a way to get it back."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import deepnvme

INPUT = torch.linspace(-1, 1, 96).view(2, 48)
POINTS = 150


def model() -> nn.Module:
    torch.manual_seed(7)
    made = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)])
    # Tied, so that a group has parameters of two modules.
    made[3].weight = made[0].weight
    return made.eval().requires_grad_(requires_grad=False)


def offload(folder: Path) -> tuple[nn.Module, Callable[[], object]]:
    made = model()
    return made, lambda: deepnvme.offload_parameters(made, memory="40KB", swap_dir=folder)


def stream(folder: Path) -> tuple[nn.Module, Callable[[], object]]:
    made = model()
    deepnvme.save(made.state_dict(), folder / "w.safetensors")
    return made, lambda: deepnvme.stream(made, weights=folder / "w.safetensors", memory="60KB")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("make", "name"), [(offload, "offloading"), (stream, "streaming")])
def test_an_interrupt_loses_no_weight(tmp_path: Path, interrupted: Any, make: Any, name: str) -> None:
    expected = {key: value.clone() for key, value in model().state_dict().items()}
    for _ in range(2):
        made, begin = make(tmp_path)
        with interrupted() as points:
            begin()
        getattr(made, name).close()
    assert points.count > POINTS
    stopped, hooks = 0, len(_global_optimizer_pre_hooks)
    # Each of the last points, and some of those before.
    chosen = {*range(1, points.count, max(points.count // POINTS, 1)), *range(points.count - 80, points.count + 1)}
    for point in sorted(chosen):
        made, begin = make(tmp_path)
        try:
            with interrupted(point):
                begin()
        except KeyboardInterrupt:
            stopped += 1
        control = getattr(made, name, None)
        if control is not None:
            control.close()
            delattr(made, name)
        where = f"interrupted at point {point} of {points.count}"
        for key, value in made.named_parameters():
            assert type(value) is nn.Parameter, f"{key}: {where}"
            assert torch.equal(value, expected[key]), f"{key}: {where}"
        assert torch.equal(made(INPUT), model()(INPUT)), where
        made.load_state_dict(expected)
        # No hook or wrapper stays behind.
        assert copy.deepcopy(made).bfloat16()[0].weight.dtype == torch.bfloat16, where
        assert len(_global_optimizer_pre_hooks) == hooks, where
        if control is None:
            # It can begin again.
            begin()
            getattr(made, name).close()
            assert torch.equal(made(INPUT), model()(INPUT)), where
    assert stopped > POINTS // 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_close_is_repeated(tmp_path: Path, interrupted: Any) -> None:
    expected = {key: value.clone() for key, value in model().state_dict().items()}
    made, begin = offload(tmp_path)
    begin()
    with interrupted() as points:
        made.offloading.close()  # type: ignore[operator,union-attr]
    for point in range(1, points.count + 1):
        made, begin = offload(tmp_path)
        begin()
        try:
            with interrupted(point):
                made.offloading.close()  # type: ignore[operator,union-attr]
        except KeyboardInterrupt:
            made.offloading.close()  # type: ignore[operator,union-attr]
        for key, value in made.named_parameters():
            assert torch.equal(value, expected[key]), f"{key}: interrupted at point {point} of {points.count}"
        copy.deepcopy(made.to(torch.bfloat16).state_dict())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("in_backward", [False, True])
def test_an_interrupted_attach_is_repeated(tmp_path: Path, interrupted: Any, in_backward: bool) -> None:
    def train(point: int, own: bool) -> tuple[list[torch.Tensor], int]:
        torch.set_grad_enabled(True)
        made = model().requires_grad_().train()
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
        points = None
        with contextlib.ExitStack() as stack:
            if own:
                offloading = stack.enter_context(deepnvme.offload_parameters(made, memory="40KB", swap_dir=tmp_path))
                try:
                    with interrupted(point) as points:
                        offloading.attach(optimizer, in_backward=in_backward)
                except KeyboardInterrupt:
                    if "step" not in vars(optimizer):
                        offloading.attach(optimizer, in_backward=in_backward)
            for _ in range(2):
                made(INPUT).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [param.detach().clone() for param in made.parameters()], points.count if points else 0

    expected, _ = train(0, own=False)
    _, count = train(0, own=True)
    for point in range(1, count + 1):
        found, _ = train(point, own=True)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), f"interrupted at point {point} of {count}"


def test_a_full_disk_changes_nothing(tmp_path: Path, file_systems: Any) -> None:
    disk = file_systems.mount("ext4", 8)
    torch.manual_seed(3)
    made = nn.Sequential(*[nn.Linear(600, 600) for _ in range(10)])
    expected = {key: value.clone() for key, value in made.state_dict().items()}
    with pytest.raises(OSError, match="No space left") as refused:
        deepnvme.offload_parameters(made, memory="4MB", swap_dir=disk)
    free = re.search(r"and (\d+) are free", str(refused.value))
    assert free is not None
    assert int(free[1]) < 8 << 20, "of another file system"
    assert not hasattr(made, "offloading")
    for key, value in made.named_parameters():
        assert torch.equal(value, expected[key]), key
    deepnvme.offload_parameters(made, memory="4MB", swap_dir=tmp_path).close()
    assert torch.equal(made[9].get_parameter("weight"), expected["9.weight"])
