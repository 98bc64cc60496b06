"""State on disk equals state in memory bit for bit, within its memory limit, and through state dicts."""

from __future__ import annotations

import copy
import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme import optim

from .nets import KINDS, MEMORY, assert_same_parameters, groups, train, twins

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(tmp_path: Path, kind: Any, settings: dict[str, Any], dtype: torch.dtype) -> None:
    one, other = twins(dtype)
    mine = kind(groups(one), **settings, swap_dir=tmp_path, memory=MEMORY)
    his = kind(groups(other), **settings)
    train(one, mine, range(8))
    train(other, his, range(8))
    assert_same_parameters(one, other)
    ours, theirs = mine.state_dict(), his.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert ours["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(ours["state"][index][name]), torch.as_tensor(value)), (index, name)
    stats = mine.swap_stats()
    assert stats.resident_bytes_peak <= MEMORY
    # SGD without momentum has no state, apart from master weights.
    has_state = kind is not optim.SGD or "momentum" in settings or dtype is torch.bfloat16
    assert bool(stats.items) is has_state
    if has_state:
        assert stats.stored_bytes > 2 * MEMORY
        assert stats.bytes_read > 3 * stats.stored_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stochastic", [False, True])
def test_sgd_without_momentum_and_with_it_later(tmp_path: Path, dtype: torch.dtype, stochastic: bool) -> None:
    """The first momentum buffer is the gradient, whenever it comes, and the noise is the same without state."""
    one, other = twins(dtype)
    options: Any = {"lr": 0.01, "dampening": 0.5, "stochastic_rounding": stochastic, "seed": 3}
    mine = optim.SGD(groups(one), **options, swap_dir=tmp_path, memory=MEMORY)
    his = optim.SGD(groups(other), **options)
    train(one, mine, range(3))
    train(other, his, range(3))
    assert_same_parameters(one, other)
    for optimizer in (mine, his):
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
    train(one, mine, range(3, 6))
    train(other, his, range(3, 6))
    assert_same_parameters(one, other)


@pytest.mark.parametrize(("kind", "theirs", "settings"), [
    (optim.AdamW, torch.optim.AdamW, {"lr": 1e-3}),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (optim.Adagrad, torch.optim.Adagrad, {"lr": 1e-2}),
])  # fmt: skip
def test_training_goes_on_in_torchs_optimizer_and_back(
    tmp_path: Path, kind: Any, theirs: Any, settings: dict[str, Any]
) -> None:
    one, other = twins()
    his = theirs(other.parameters(), **settings, foreach=False)
    train(other, his, range(3))
    one.load_state_dict(other.state_dict())
    mine = kind(one.parameters(), **settings, swap_dir=tmp_path, memory=MEMORY)
    train(one, mine, range(7, 9))  # this state is replaced below
    one.load_state_dict(other.state_dict())
    # torch's optimizers keep the given tensors, and the other one continues with its own.
    mine.load_state_dict(copy.deepcopy(his.state_dict()))
    train(one, mine, range(3, 6))
    train(other, his, range(3, 6))
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_one, his_one, rtol=1e-4, atol=1e-5)
    back = theirs(one.parameters(), **settings, foreach=False)
    back.load_state_dict(mine.state_dict())
    train(one, back, range(6, 8))
    train(other, his, range(6, 8))
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_one, his_one, rtol=1e-4, atol=1e-5)
    deepnvme.save(mine.state_dict(), tmp_path / "optimizer.pt")
    assert deepnvme.load(tmp_path / "optimizer.pt")["state"].keys() == mine.state_dict()["state"].keys()


def test_with_parameters_on_disk_too(tmp_path: Path) -> None:
    """Parameters and state each exceed their memory."""
    one, other = twins()
    offloading = deepnvme.offload_parameters(one, memory="512KiB", swap_dir=tmp_path)
    assert offloading.parameter_bytes > 512 << 10
    mine = optim.AdamW(one.parameters(), lr=1e-3, swap_dir=tmp_path, memory=MEMORY)
    offloading.attach(mine)
    his = optim.AdamW(other.parameters(), lr=1e-3)
    train(one, mine, range(6))
    train(other, his, range(6))
    for name, tensor in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], tensor), name
    stats = mine.swap_stats()
    assert stats is not None
    assert stats.resident_bytes_peak <= MEMORY
    assert stats.stored_bytes > 2 * MEMORY


def test_refusals(tmp_path: Path) -> None:
    net, _ = twins()
    for settings in ({"swap_dir": tmp_path}, {"memory": "1GB"}):
        with pytest.raises(ValueError, match="needs both"):
            optim.AdamW(net.parameters(), **settings)
    (tmp_path / "file").touch()
    with pytest.raises(deepnvme.errors.NotFolderError) as caught:
        optim.AdamW(net.parameters(), swap_dir=tmp_path / "file" / "below", memory="1MB")
    assert caught.value.errno == errno.ENOTDIR
    optimizer = optim.AdamW(net.parameters(), swap_dir=tmp_path, memory="1MB", checksums=True)
    train(net, optimizer, range(2))
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    assert optim.AdamW(net.parameters()).swap_stats() is None


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_clipping_with_parameters_on_disk(tmp_path: Path, swap_gradients: bool) -> None:
    """The norm covers all gradients, although param groups are updated one after another."""
    one, other = twins()
    offloading = deepnvme.offload_parameters(one, memory="512KiB", swap_dir=tmp_path)
    settings: dict[str, Any] = {"lr": 1e-2, "max_norm": 1e-3}
    mine = optim.AdamW(one.parameters(), **settings, swap_dir=tmp_path, memory=MEMORY, swap_gradients=swap_gradients)
    offloading.attach(mine)
    his = optim.AdamW(other.parameters(), **settings)
    train(one, mine, range(4))
    train(other, his, range(4))
    offloading.close()
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_one, his_one, rtol=1e-4, atol=1e-6)


def test_small_parameters_share_a_group(tmp_path: Path) -> None:
    """Two param groups with different settings need one group of state each."""
    params = [nn.Parameter(torch.randn(10)) for _ in range(60)]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.1}]
    optimizer = optim.AdamW(groups, swap_dir=tmp_path, memory="64KiB")
    for _ in range(4):
        for param in params:
            param.grad = torch.randn(10)
        optimizer.step()
    stats = optimizer.swap_stats()
    assert stats is not None
    assert stats.items == 2, "one for each param group"
    optimizer = optim.AdamW(
        [{"params": params[:2]}, {"params": params[2:4], "lr": 0.1}], swap_dir=tmp_path, memory="1MB"
    )
    optimizer.load_state_dict(optimizer.state_dict())  # before the first step, there is no state
    assert optimizer.state_dict()["state"] == {}
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.1]


@pytest.mark.parametrize(("swapped", "gradients"), [(False, False), (True, False), (True, True)])
def test_parameters_without_elements(tmp_path: Path, swapped: bool, gradients: bool) -> None:
    """They count steps as all others do, alone in their group and among others."""

    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(3)
        return [nn.Parameter(torch.randn(shape)) for shape in ((10,), (0, 4), (0,), (7, 3))]

    def steps(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, count: int = 3) -> None:
        for number in range(count):
            for one in parameters:
                one.grad = torch.full_like(one, number + 1.0)
            optimizer.step()

    def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[:1]},
            {"params": parameters[1:2], "weight_decay": 0.0},
            {"params": parameters[2:]},
        ]

    options: dict[str, Any] = {"swap_dir": tmp_path, "memory": MEMORY, "swap_gradients": gradients} if swapped else {}
    one, other = parameters(), parameters()
    mine, his = optim.AdamW(groups_of(one), lr=1e-2, **options), torch.optim.AdamW(groups_of(other), lr=1e-2)
    steps(one, mine)
    steps(other, his)
    for left, right in zip(one, other, strict=True):
        assert torch.allclose(left, right, atol=1e-6)
    state = mine.state_dict()["state"]
    assert [float(state[index]["step"]) for index in range(4)] == [3.0] * 4
    assert state[1]["exp_avg"].shape == (0, 4)
    again = parameters()
    loaded = optim.AdamW(groups_of(again), lr=1e-2, **options)
    loaded.load_state_dict(copy.deepcopy(mine.state_dict()))
    steps(again, loaded, 1)
    fourth = parameters()
    expected = torch.optim.AdamW(groups_of(fourth), lr=1e-2)
    expected.load_state_dict(copy.deepcopy(his.state_dict()))
    steps(fourth, expected, 1)
    for left, right in zip(again, fourth, strict=True):
        assert torch.allclose(left, right, atol=1e-6)
    if swapped:
        mine.save_state(tmp_path / "state.safetensors")
        third = parameters()
        resumed = optim.AdamW(groups_of(third), lr=1e-2, **options)
        resumed.load_state(tmp_path / "state.safetensors")
        steps(third, resumed, 1)
        for left, right in zip(again, third, strict=True):
            assert torch.equal(left, right)
