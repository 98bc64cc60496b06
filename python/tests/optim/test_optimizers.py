"""`deepnvme.optim` in place of `torch.optim`: the same bits and state, with typical training code."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme import optim

from .conftest import assert_same_bits
from .nets import Net, groups, loss_of, train, twins

_PAIRS: list[tuple[Any, Any, dict[str, Any], bool]] = [
    (optim.AdamW, torch.optim.AdamW, {"lr": 3e-3, "amsgrad": True}, True),
    (optim.Adam, torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.1, "maximize": True}, True),
    (optim.Adam, torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}, True),
    (optim.SGD, torch.optim.SGD, {"lr": 3e-3}, False),
    (optim.SGD, torch.optim.SGD, {"lr": 3e-3, "momentum": 0.9, "dampening": 0.2}, False),
    (optim.Adagrad, torch.optim.Adagrad, {"lr": 3e-3, "initial_accumulator_value": 0.1}, True),
]
_pairs = pytest.mark.parametrize(("ours", "theirs", "settings", "needs_root"), _PAIRS)


def _assert_alike(one: Net, other: Net, *, needs_root: bool) -> None:
    for mine, his in zip(one.parameters(), other.parameters(), strict=True):
        assert_same_bits(mine.detach(), his.detach(), needs_root=needs_root)


@_pairs
def test_many_steps_with_groups_and_a_schedule(ours: Any, theirs: Any, settings: Any, needs_root: bool) -> None:
    one, other = twins()
    mine, his = ours(groups(one), **settings), theirs(groups(other), foreach=False, **settings)
    for net, optimizer in ((one, mine), (other, his)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.02, 0.01], total_steps=100, cycle_momentum=False, anneal_strategy="cos"
        )
        train(net, optimizer, range(80), scheduler)
    _assert_alike(one, other, needs_root=needs_root)
    assert isinstance(mine, theirs)


@_pairs
def test_training_goes_on_in_the_other(ours: Any, theirs: Any, settings: Any, needs_root: bool) -> None:
    one, other = twins()
    mine, his = ours(groups(one), **settings), theirs(groups(other), foreach=False, **settings)
    train(one, mine, range(5))
    train(other, his, range(5))
    # Each loads the other's state, through a pickle as in files.
    new_mine = ours(groups(one), **settings)
    new_his = theirs(groups(other), foreach=False, **settings)
    new_mine.load_state_dict(pickle.loads(pickle.dumps(his.state_dict())))
    new_his.load_state_dict(pickle.loads(pickle.dumps(mine.state_dict())))
    new_his.param_groups[0]["foreach"] = new_his.param_groups[1]["foreach"] = False
    train(one, new_mine, range(5, 10))
    train(other, new_his, range(5, 10))
    _assert_alike(one, other, needs_root=needs_root)


def test_a_grad_scaler_skips_infinite_gradients() -> None:
    one, other = twins()
    mine, his = optim.AdamW(one.parameters()), torch.optim.AdamW(other.parameters(), foreach=False)
    for net, optimizer in ((one, mine), (other, his)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        for step in range(12):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(net, step))
            loss.backward()  # type: ignore[no-untyped-call]
            if step in (4, 5):
                assert net.last.weight.grad is not None
                net.last.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        # Grown once, halved twice, grown twice.
        assert scaler.get_scale() == 256.0 * 2 / 4 * 4
    assert mine.state[one.last.weight]["step"] == 10
    _assert_alike(one, other, needs_root=True)


def test_closures_and_clipping() -> None:
    one, other = twins()
    mine = optim.AdamW(one.parameters(), max_norm=0.1)
    his = torch.optim.AdamW(other.parameters(), foreach=False)
    for step in range(10):

        def closure(step: int = step) -> torch.Tensor:
            mine.zero_grad()
            loss = loss_of(one, step)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss = mine.step(closure)
        his.zero_grad()
        theirs = loss_of(other, step)
        theirs.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        his.step()
        torch.testing.assert_close(loss, theirs)
    # torch's norm is an fp32 sum, so the last bits of the coefficient may differ.
    for ours, his_param in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, his_param, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stochastic", [False, True])
def test_short_parameters_have_master_weights(stochastic: bool) -> None:
    torch.manual_seed(3)
    master = nn.Parameter(torch.randn(500))
    short = nn.Parameter(master.detach().bfloat16())
    master.data.copy_(short.detach())
    mine = optim.AdamW([short], stochastic_rounding=stochastic, seed=4)
    his = torch.optim.AdamW([master], foreach=False)
    for step in range(20):
        short.grad = torch.randn(500).bfloat16()
        master.grad = short.grad.float()
        mine.step()
        his.step()
        if step == 10:
            again = optim.AdamW([short], stochastic_rounding=stochastic, seed=4)
            again.load_state_dict(pickle.loads(pickle.dumps(mine.state_dict())))
            mine = again
    assert_same_bits(mine.state[short]["master"], master.detach(), needs_root=True)
    assert mine.state[short]["exp_avg"].dtype == torch.float32
    away = (short.detach().float() - master.detach()).abs() / master.detach().abs()
    assert away.max() < (2.0**-7 if stochastic else 2.0**-8) * 1.01
    assert torch.equal(short.detach(), master.detach().bfloat16()) is not stochastic


def test_lion_goes_down_and_can_be_saved() -> None:
    net, _ = twins()
    lion = optim.Lion(groups(net), lr=1e-3, weight_decay=0.1)
    before = loss_of(net, 0).item()
    train(net, lion, range(50))
    assert loss_of(net, 0).item() < before / 2
    assert set(lion.state[net.last.weight]) == {"step", "exp_avg"}
    again = optim.Lion(groups(net), lr=1.0)
    again.load_state_dict(lion.state_dict())
    assert again.param_groups[1]["lr"] == 2e-3
    with pytest.raises(ValueError, match="betas are"):
        optim.Lion(net.parameters(), betas=(1.0, 0.9))


def test_an_optimizer_is_copied_and_pickled_with_its_state() -> None:
    net, _ = twins()
    optimizer = optim.AdamW(net.parameters(), max_norm=1.0, threads=1)
    train(net, optimizer, range(3))
    other, again = pickle.loads(pickle.dumps((net, optimizer)))
    train(net, optimizer, range(3, 6))
    train(other, again, range(3, 6))
    _assert_alike(net, other, needs_root=True)


def test_refused_arguments() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="sparse=False, or give"):
        optim.AdamW(embedding.parameters()).step()
    assert torch.equal(embedding.weight.detach(), before)
    double = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    double.grad = torch.zeros_like(double)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        optim.SGD([double]).step()
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.zeros(3)
    with pytest.raises(ValueError, match="neither be differentiated"):
        optim.SGD([param], differentiable=True).step()
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.AdamW([param], lr=-1.0)
    assert deepnvme.optim is optim


@pytest.mark.parametrize(("kind", "settings"), [
    (optim.AdamW, {"stochastic_rounding": True}),
    (optim.SGD, {"stochastic_rounding": True, "momentum": 0.9}),
    (optim.SGD, {"moments": "8bit", "momentum": 0.9}),
    (optim.Lion, {"moments": "bf16", "stochastic_rounding": True}),
])  # fmt: skip
def test_noise_is_the_same_after_a_restart(kind: Any, settings: dict[str, Any]) -> None:
    weights = [torch.randn(300, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3)]

    def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for place, param in enumerate(params):
                generator = torch.Generator().manual_seed(10 * step + place)
                param.grad = torch.randn(300, generator=generator).bfloat16()
            optimizer.step()

    whole = [nn.Parameter(weight.clone()) for weight in weights]
    run(whole, kind(whole, lr=1e-3, seed=5, **settings), range(6))
    half = [nn.Parameter(weight.clone()) for weight in weights]
    first = kind(half, lr=1e-3, seed=5, **settings)
    run(half, first, range(3))
    second = kind(half, lr=1e-3, seed=5, **settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(half, second, range(3, 6))
    for one, other in zip(whole, half, strict=True):
        assert torch.equal(one, other)


def test_noise_differs_from_step_to_step() -> None:
    """The same gradient is rounded differently the next time, also without step counts."""
    still = nn.Parameter(torch.ones(4000).bfloat16())
    optimizer = optim.SGD([still], lr=1e-3, stochastic_rounding=True)
    seen = []
    for _ in range(2):
        still.grad = torch.ones(4000).bfloat16()
        before = still.detach().clone()
        optimizer.step()
        seen.append(still.detach() != before)
    assert not torch.equal(*seen)
