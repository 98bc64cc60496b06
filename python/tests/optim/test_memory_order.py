"""State and gradients on disk follow a parameter whose memory order changes, between steps and between files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme import errors, optim
from deepnvme._utils.tensors import MemoryOrder, is_dense, is_dense_order

Reorder = Callable[[torch.Tensor], torch.Tensor]


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else transposed(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with its dimensions in the opposite order in memory."""
    dims = list(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


ORDERS: dict[str, Reorder] = {"row major": row_major, "channels last": channels_last, "transposed": transposed}
SHAPES = [(4, 3, 5, 2), (6, 7), (1, 8, 1, 3), (5,), (3, 0, 2, 2), ()]


def model(order: Reorder, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(order(torch.randn(shape).to(dtype))) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        # In the order of a gradient that autograd makes.
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape))


def reorder(params: list[nn.Parameter], order: Reorder) -> None:
    for param in params:
        param.data = order(param.data)


def assert_same(found: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def assert_same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    ours, theirs = found.state_dict()["state"], expected.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(ours[index][name]), torch.as_tensor(value)), (index, name)


@pytest.mark.parametrize("first", ORDERS)
@pytest.mark.parametrize("then", ORDERS)
def test_a_step_follows_a_new_order(tmp_path: Path, first: str, then: str) -> None:
    params, expected = model(ORDERS[first]), model(row_major)
    ours = optim.AdamW(params, lr=0.1, swap_dir=tmp_path, memory="1MB")
    theirs = torch.optim.AdamW(expected, lr=0.1)
    for step in range(4):
        if step == 2:
            reorder(params, ORDERS[then])
        for optimizer, some in ((ours, params), (theirs, expected)):
            set_gradients(some, step)
            optimizer.step()
        assert_same(params, expected)
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_fp32_weights_of_bf16_parameters_stay_where_they_are(tmp_path: Path, moments: Any) -> None:
    params = model(row_major, torch.bfloat16)
    optimizer = optim.AdamW(params, lr=0.0, weight_decay=0.0, moments=moments, swap_dir=tmp_path, memory="1MB")
    set_gradients(params, 1)
    optimizer.step()
    for order in (channels_last, transposed, row_major):
        before = [param.detach().clone() for param in params]
        reorder(params, order)
        set_gradients(params, 2)
        optimizer.step()
        for param, value in zip(params, before, strict=True):
            assert torch.equal(param, value)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_state_dict_between_a_new_order_and_the_next_step(tmp_path: Path, in_memory: bool) -> None:
    params = model(row_major, torch.bfloat16)
    settings: dict[str, Any] = {} if in_memory else {"swap_dir": tmp_path, "memory": "1MB"}
    optimizer = optim.AdamW(params, lr=0.1, moments="bf16", **settings)
    set_gradients(params, 1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    reorder(params, channels_last)
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[index][name]), (index, name)


@pytest.mark.parametrize("saved", ORDERS)
@pytest.mark.parametrize("loaded", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_loaded_in_the_order_of_the_parameters(
    tmp_path: Path, saved: str, loaded: str, dtype: torch.dtype
) -> None:
    first = model(ORDERS[saved], dtype)
    saver = optim.AdamW(first, lr=0.1, swap_dir=tmp_path, memory="1MB")
    set_gradients(first, 1)
    saver.step()
    saver.save_state(tmp_path / "state.safetensors")
    second = model(ORDERS[loaded], dtype)
    with torch.no_grad():
        for one, other in zip(second, first, strict=True):
            one.copy_(other)
    loader = optim.AdamW(second, lr=0.1, swap_dir=tmp_path, memory="1MB")
    loader.load_state(tmp_path / "state.safetensors", verify="full")
    assert_same_state(loader, saver)
    for optimizer, params in ((saver, first), (loader, second)):
        set_gradients(params, 2)
        optimizer.step()
    assert_same(second, first)
    assert_same_state(loader, saver)


def test_a_file_saved_after_a_new_order_has_that_order(tmp_path: Path) -> None:
    params = model(row_major)
    saver = optim.AdamW(params, lr=0.1, swap_dir=tmp_path, memory="1MB")
    set_gradients(params, 1)
    saver.step()
    reorder(params, channels_last)
    saver.save_state(tmp_path / "state.safetensors")
    loader = optim.AdamW(model(channels_last), lr=0.1, swap_dir=tmp_path, memory="1MB")
    loader.load_state(tmp_path / "state.safetensors")
    assert_same_state(loader, saver)


def test_shards_of_another_order_are_refused(tmp_path: Path) -> None:
    def made(order: Reorder) -> tuple[optim.AdamW, dict[nn.Parameter, tuple[str, int]]]:
        param = nn.Parameter(order(torch.randn(4, 6)))
        optimizer = optim.AdamW([param], lr=0.1, swap_dir=tmp_path, memory="1MB")
        param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer, {param: ("w", 0)}

    saver, shards = made(transposed)
    saver.save_state(tmp_path / "state.safetensors", shards=shards)
    same, shards = made(transposed)
    same.load_state(tmp_path / "state.safetensors", shards=shards)
    assert_same_state(same, saver)
    other, shards = made(row_major)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(errors.InvalidArgumentError, match="the elements of w have another memory order"):
        other.load_state(tmp_path / "state.safetensors", shards=shards)
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


@pytest.mark.parametrize("steps_before", [0, 1])
def test_gradients_on_disk_follow_a_new_order(tmp_path: Path, steps_before: int) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 3, 2))
    theirs = copy.deepcopy(ours)
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizers: list[tuple[nn.Module, torch.optim.Optimizer]] = [
        (ours, optim.SGD(ours.parameters(), swap_dir=tmp_path, memory="1MB", swap_gradients=True, **settings)),
        (theirs, torch.optim.SGD(theirs.parameters(), **settings)),
    ]
    data = [torch.randn(2, 4, 6, 6) for _ in range(3)]
    for network, optimizer in optimizers:
        for step in range(steps_before + 1):
            network(data[0]).square().sum().mul(1e-3).backward()
            if step == steps_before:
                network.to(memory_format=torch.channels_last)
                network(data[1]).square().sum().mul(1e-3).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(700,), (300,), (10, 50)])
@pytest.mark.parametrize("swap_gradients", [False, True])
def test_a_parameter_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...], swap_gradients: bool) -> None:
    param = nn.Parameter(torch.randn(500))
    optimizer = optim.SGD([param], lr=0.1, momentum=0.9, swap_dir=tmp_path, memory="1MB", swap_gradients=swap_gradients)
    param.square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    state, values = copy.deepcopy(optimizer.state_dict()), torch.randn(shape)
    optimizer.zero_grad()
    param.data = values.clone()
    with pytest.raises(errors.InvalidArgumentError, match=r"its state the shape \(500,\); make a new optimizer"):
        param.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.equal(param, values)
    param.data = torch.zeros(500)
    kept = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(kept, state["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_ctrl_c_while_state_follows_loses_nothing(tmp_path: Path, interrupted: Any, swap_gradients: bool) -> None:
    def made() -> tuple[list[nn.Parameter], optim.AdamW]:
        params = model(row_major)
        settings: dict[str, Any] = {"swap_dir": tmp_path, "memory": "1MB", "swap_gradients": swap_gradients}
        optimizer = optim.AdamW(params, lr=0.1, **settings)
        for seed in (1, 2):
            if seed == 2:
                reorder(params, channels_last)
            torch.manual_seed(seed)
            sum((param * torch.randn(param.shape)).sum() for param in params).backward()  # type: ignore[union-attr]
            if seed == 1:
                optimizer.step()
                optimizer.zero_grad()
        return params, optimizer

    expected, reference = made()
    reference.step()
    params, optimizer = made()
    with interrupted() as points:
        optimizer.step()
    assert_same(params, expected)
    stopped = 0
    for point in range(1, points.count + 1, max(points.count // 120, 1)):
        params, optimizer = made()
        try:
            with interrupted(point):
                optimizer.step()
        except KeyboardInterrupt:
            stopped += 1
            # The last points come after the step.
            if optimizer.has_unfinished_step or optimizer.state[params[0]]["step"] < 2:
                optimizer.step()
        assert_same(params, expected)
        assert_same_state(optimizer, reference)
        optimizer.close()
    assert stopped > 60


def test_several_param_groups_follow_new_orders(tmp_path: Path) -> None:
    """State that leaves a place for another one may leave a group of places empty, which is then deleted."""
    for history in range(20):
        torch.manual_seed(history)
        shapes = [(33, 65), (64, 9), (128, 300), (37, 3)]
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        expected = [nn.Parameter(param.detach().clone()) for param in params]
        ours = optim.SGD(
            [{"params": [param]} for param in params], lr=0.1, momentum=0.9, swap_dir=tmp_path, memory="1MB"
        )
        theirs = torch.optim.SGD(expected, lr=0.1, momentum=0.9)
        for _ in range(8):
            chosen = torch.rand(len(params)) < 0.6
            for param, other, has_gradient in zip(params, expected, chosen, strict=True):
                other.grad = torch.randn(other.shape) if has_gradient else None
                param.grad = None if other.grad is None else other.grad.clone()
            ours.step()
            theirs.step()
            assert_same(params, expected)
            for param in params:
                if torch.rand(()) < 0.4:
                    param.data = transposed(param.data) if param.is_contiguous() else row_major(param.data)
        ours.state_dict()
        ours.close()


def test_moments_of_8_bits_in_memory_keep_their_scales() -> None:
    torch.manual_seed(0)
    scale = torch.logspace(-4, 2, 64).view(64, 1, 1, 1) * torch.logspace(-2, 2, 16).view(16, 1, 1)
    param = nn.Parameter(torch.randn(64, 16, 3, 3))
    optimizer = optim.AdamW([param], lr=1e-3, weight_decay=0, moments="8bit")
    param.grad = torch.randn(param.shape) * scale
    optimizer.step()
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    param.data = channels_last(param.data)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    after = optimizer.state_dict()["state"][0]["exp_avg"]
    ratios = (after / (0.9 * before))[before != 0]
    # Values that are small among their new neighbours lose digits. The others stay.
    assert 0.8 < ratios.quantile(0.05) < ratios.quantile(0.95) < 1.25


@pytest.mark.parametrize("then", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_on_disk_follow_a_new_dtype(tmp_path: Path, first: torch.dtype, then: torch.dtype) -> None:
    results = []
    for swap_gradients in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).to(first)
        optimizer = optim.SGD(
            network.parameters(), lr=0.1, momentum=0.9, swap_dir=tmp_path, memory="1MB", swap_gradients=swap_gradients
        )
        data = torch.randn(4, 64)
        for has_changed in (False, True):
            network(data.to(then if has_changed else first)).float().square().mean().backward()
            if not has_changed:
                network.to(then)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        results.append([param.detach().float() for param in network.parameters()])
        optimizer.close()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_state_of_a_removed_param_group_is_not_saved(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.randn(30)), nn.Parameter(torch.randn(50))]
    optimizer = optim.AdamW([{"params": [param]} for param in params], swap_dir=tmp_path, memory="1MB")
    set_gradients(params, 1)
    optimizer.step()
    optimizer.param_groups.pop(1)
    optimizer.state.pop(params[1])
    optimizer.save_state(tmp_path / "state.safetensors")
    other = optim.AdamW([nn.Parameter(params[0].detach().clone())], swap_dir=tmp_path, memory="1MB")
    other.load_state(tmp_path / "state.safetensors")
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_gradient_on_disk_is_assigned_or_refused(tmp_path: Path) -> None:
    def made(swap_gradients: bool) -> tuple[list[nn.Parameter], optim.SGD]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40)) for _ in range(2)]
        optimizer = optim.SGD(params, lr=0.1, swap_dir=tmp_path, memory="1MB", swap_gradients=swap_gradients)
        sum((param * torch.randn(40)).sum() for param in params).backward()  # type: ignore[union-attr]
        return params, optimizer

    results = []
    for swap_gradients in (False, True):
        params, optimizer = made(swap_gradients)
        for param in params:
            assert param.grad is not None
            param.grad.data = param.grad.data * 2
        optimizer.step()
        results.append(params)
    assert_same(results[1], results[0])
    params, optimizer = made(swap_gradients=True)
    values = [param.detach().clone() for param in params]
    params[1].grad = params[0].grad
    with pytest.raises(errors.UnsupportedError, match="the gradient of another one"):
        optimizer.step()
    for param, value in zip(params, values, strict=True):
        assert torch.equal(param, value)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(2, 3), True),
        (torch.empty(3, 2).T, True),
        (torch.empty(2, 0), True),
        (torch.empty(4, 3)[::2], False),
        (torch.empty(1, 3).expand(2, 3), False),
    ],
)
def test_a_dense_tensor_has_neither_gaps_nor_overlaps(tensor: torch.Tensor, *, expected: bool) -> None:
    assert is_dense(tensor) == expected
    assert is_dense_order(MemoryOrder.of(tensor.shape, tensor.stride())) == expected
