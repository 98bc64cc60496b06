"""Random changes between steps: new gradients, memory, settings and states. Steps stay equal to torch's.

Where torch computes something else (short parameters, short moments), they equal steps of the general code, which looks
at each parameter anew.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from deepnvme import optim
from deepnvme.optim._running_step import Gathered

from .conftest import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SHAPES = [(5,), (300,), (40, 7), (1,), (8, 3, 3, 3), (0,), (), (1, 1, 9), (1500,)]
_STEPS = 25

_PAIRS: list[tuple[Any, Any, dict[str, Any], bool]] = [
    (optim.AdamW, torch.optim.AdamW, {"lr": 1e-2}, True),
    (optim.Adam, torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}, True),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}, False),
    (optim.SGD, torch.optim.SGD, {"lr": 1e-2}, False),
    (optim.Adagrad, torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}, True),
]


class _Side:
    """An optimizer with its parameters. Two sides with the same seed see the same changes."""

    def __init__(self, make: Callable[[Any], Any], seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.random, self.values = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.params = [self.parameter(shape) for shape in _SHAPES]
        half = len(self.params) // 2
        self.optimizer = make([{"params": self.params[:half]}, {"params": self.params[half:], "lr": 0.02}])

    def normal(self, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=self.values)

    def parameter(self, shape: tuple[int, ...]) -> Any:
        data = self.normal(shape).to(self.dtype)
        if len(shape) == 4:
            data = data.to(memory_format=torch.channels_last)
        return nn.Parameter(data)


def _backward(side: _Side) -> None:
    """Set gradients in one of many ways."""
    for param in side.params:
        way, new = side.random.randrange(12), side.normal(param.shape).to(param.dtype)
        if way == 0:
            param.grad = None
        elif way == 1 and param.grad is not None:
            param.grad.add_(new)
        elif way == 2 and param.grad is not None:
            param.grad = param.grad.clone()
        elif way == 3:
            # A view with gaps.
            param.grad = torch.stack([new, new], -1)[..., 0]
        elif way == 4 and param.dim() > 1:
            param.grad = new.transpose(0, 1).contiguous().transpose(0, 1)
        elif way == 5:
            # A view of a longer one.
            param.grad = torch.cat([new.flatten(), new.flatten()])[param.numel() :].view(param.shape)
        elif way == 6:
            pass
        else:
            param.grad = new


def _lower_the_rate(side: _Side) -> None:
    side.optimizer.param_groups[0]["lr"] *= 0.7


def _decay(side: _Side) -> None:
    side.optimizer.param_groups[1]["weight_decay"] = side.random.random()


def _toggle(side: _Side) -> None:
    param = side.random.choice(side.params)
    param.requires_grad_(not param.requires_grad)


def _add_group(side: _Side) -> None:
    if len(side.params) < 2 * len(_SHAPES):
        added = [side.parameter((17,)), side.parameter((3, 50))]
        side.params += added
        side.optimizer.add_param_group({"params": added, "lr": 0.005})


def _load(side: _Side) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def _move(side: _Side) -> None:
    param = side.random.choice(side.params)
    param.data = param.data.clone()


def _scale(side: _Side) -> None:
    with torch.no_grad():
        side.random.choice(side.params).mul_(0.9)


def _reorder(side: _Side) -> None:
    param = side.random.choice(side.params)
    if param.dim() > 1:
        param.data, param.grad = param.data.transpose(0, 1).contiguous().transpose(0, 1), None


def _copy(side: _Side) -> None:
    side.params, side.optimizer = copy.deepcopy((side.params, side.optimizer))


def _pickle(side: _Side) -> None:
    side.params, side.optimizer = pickle.loads(pickle.dumps((side.params, side.optimizer)))


def _resize(side: _Side) -> None:
    param = side.random.choice(side.params)
    param.data, param.grad = side.normal((*param.shape, 2)).to(param.dtype), None
    side.optimizer.state.pop(param, None)


def _forget(side: _Side) -> None:
    side.optimizer.state.pop(side.random.choice(side.params), None)


def _replace_state(side: _Side) -> None:
    state = side.optimizer.state.get(side.random.choice(side.params), {})
    state.update({name: value.clone() for name, value in state.items() if torch.is_tensor(value)})


_CHANGES = [_lower_the_rate, _decay, _toggle, _add_group, _load, _move, _scale]
# These change state where torch keeps it, or copy it.
_CHANGES_IN_MEMORY = [_reorder, _copy, _pickle, _resize, _forget, _replace_state]


def _change(side: _Side, *, is_in_memory: bool) -> None:
    side.random.choice(_CHANGES + _CHANGES_IN_MEMORY * is_in_memory)(side)


def _compare(mine: _Side, his: _Side, *, needs_root: bool) -> None:
    for one, other in zip(mine.params, his.params, strict=True):
        assert_same_bits(one.detach().float(), other.detach().float(), needs_root=needs_root)


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["memory", "disk"])
@pytest.mark.parametrize(("ours", "theirs", "settings", "needs_root"), _PAIRS)
def test_torchs_steps(
    tmp_path: Path, *, ours: Any, theirs: Any, settings: dict[str, Any], needs_root: bool, is_in_memory: bool
) -> None:
    where: dict[str, Any] = {} if is_in_memory else {"swap_dir": tmp_path, "memory": "64KiB", "checksums": True}
    for seed in random.Random().sample(range(1 << 30), 6):
        mine = _Side(lambda groups: ours(groups, **settings, **where), seed)
        his = _Side(lambda groups: theirs(groups, foreach=False, **settings), seed)
        for step in range(_STEPS):
            for side in (mine, his):
                _backward(side)
                side.optimizer.step()
                _change(side, is_in_memory=is_in_memory)
            try:
                _compare(mine, his, needs_root=needs_root)
            except AssertionError as error:
                msg = f"seed {seed}, step {step}: {error}"
                raise AssertionError(msg) from error
        mine.optimizer.close()


class _NothingNoted:
    """Leaves all gradients to the general code."""

    def __init__(self, groups: int) -> None:
        self.counts = [0] * groups

    def is_same(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _general(kind: Any) -> Any:
    """Derive an optimizer that has no plan."""

    class General(kind):  # type: ignore[misc]
        def _gather(self) -> Gathered:
            gathered = super()._gather()
            indirect = [
                {
                    member: self._gradient(param)
                    for member, param in enumerate(group["params"])
                    if param.grad is not None
                }
                for group in self.param_groups
            ]
            return Gathered(gathered.plan, _NothingNoted(len(indirect)), indirect)  # type: ignore[arg-type]

    General.__module__ = kind.__module__
    return General


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["memory", "disk"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.Lion])
def test_the_general_codes_steps(
    tmp_path: Path, kind: Any, dtype: torch.dtype, moments: Any, is_in_memory: bool
) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "moments": moments, "stochastic_rounding": True, "seed": 3}
    if kind is optim.SGD:
        settings["momentum"] = 0.9
    if not is_in_memory:
        settings |= {"swap_dir": tmp_path, "memory": "64KiB"}
    seed = random.randrange(1 << 30)
    mine = _Side(lambda groups: kind(groups, **settings), seed, dtype)
    his = _Side(lambda groups: _general(kind)(groups, **settings), seed, dtype)
    for step in range(_STEPS):
        for side in (mine, his):
            _backward(side)
            if step == _STEPS // 2:
                # Another dtype for one parameter, and other kinds of state.
                param = side.params[1]
                param.data, param.grad = (
                    param.data.to(torch.bfloat16 if dtype == torch.float32 else torch.float32),
                    None,
                )
                if kind is optim.SGD:
                    side.optimizer.param_groups[0]["momentum"] = 0.0
            side.optimizer.step()
            if side.random.random() < 0.5 and not (is_in_memory and step >= _STEPS // 2):
                # Classes defined in a function cannot be pickled, and copies would lose them.
                _change(side, is_in_memory=False)
        for one, other in zip(mine.params, his.params, strict=True):
            assert torch.equal(one.detach(), other.detach()), (seed, step)
    mine.optimizer.close()
    his.optimizer.close()


class _Counting:
    """Counts calls of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self.kernel, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("is_in_memory", [True, False], ids=["memory", "disk"])
def test_a_step_is_one_call_for_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, moments: Any, is_in_memory: bool
) -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("torch describes tensors to C from 2.10 on")
    where: dict[str, Any] = {} if is_in_memory else {"swap_dir": tmp_path, "memory": "8MiB"}
    side = _Side(lambda groups: optim.AdamW(groups, moments=moments, **where), 1, dtype)
    # Empty parameters have no state, and are left to the general code.
    side.params = [param for param in side.params if param.numel()]

    def step() -> None:
        for param in side.params:
            param.grad = side.normal(param.shape).to(dtype).to(memory_format=torch.preserve_format)
            if param.dim() == 4:
                param.grad = param.grad.to(memory_format=torch.channels_last)
        side.params[2].grad = None
        side.optimizer.step()

    step()
    step()
    counting = _Counting(side.optimizer._kernel)
    side.optimizer._kernel = counting
    prepared: list[Any] = []
    monkeypatch.setattr(side.optimizer, "_prepare", lambda *arguments: prepared.append(arguments))
    made, steps = side.optimizer._plans.made, 5
    for _ in range(steps):
        # New memory changes nothing.
        side.params[1].data = side.params[1].data.clone()
        side.optimizer.param_groups[0]["lr"] *= 0.9
        step()
    assert counting.calls == {"update": 2 * steps}
    assert side.optimizer._plans.made == made
    assert not prepared


def test_gradients_are_not_kept_alive() -> None:
    param = nn.Parameter(torch.ones(10))
    optimizer = optim.AdamW([param])
    for is_refused in (False, True):
        param.grad = torch.ones(10)
        grad = weakref.ref(param.grad)
        optimizer.param_groups[0]["lr"] = -1.0 if is_refused else 0.1
        error = None
        try:
            optimizer.step()
        except ValueError as caught:
            error = caught
        assert (error is not None) is is_refused
        param.grad = None
        gc.collect()
        assert grad() is None


def test_a_refused_step_changes_nothing() -> None:
    params = [nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))]
    optimizer = optim.AdamW(params)
    params[0].grad = torch.ones(10)
    params[1].grad = torch.ones(10).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(torch.equal(param.detach(), torch.ones(10)) for param in params)
    assert not optimizer.state


def test_a_backward_pass_notices_the_change() -> None:
    """As with torch: the graph has saved weights that no longer exist."""
    for kind in (optim.SGD, torch.optim.SGD):
        param = nn.Parameter(torch.ones(10))
        loss = (param * param).sum()
        param.grad = torch.ones(10)
        before = param._version
        kind([param], lr=0.1).step()
        assert param._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]


def test_parameters_that_share_memory_are_refused() -> None:
    memory = torch.ones(20)
    params = [nn.Parameter(memory[:12]), nn.Parameter(memory[8:])]
    for param in params:
        param.grad = torch.ones(12)
    with pytest.raises(ValueError, match="share memory"):
        optim.SGD(params, lr=0.1).step()


def test_a_counter_of_several_parameters_counts_each() -> None:
    sides = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        torch.manual_seed(1)
        params = [nn.Parameter(torch.randn(10)) for _ in range(2)]
        optimizer = kind(params, foreach=False)
        for step in range(4):
            for param in params:
                param.grad = torch.randn(10)
            optimizer.step()
            if step == 1:
                optimizer.state[params[1]]["step"] = optimizer.state[params[0]]["step"]
        sides.append((params, optimizer.state[params[0]]["step"].item()))
    assert sides[0][1] == sides[1][1] == 6
    for one, other in zip(sides[0][0], sides[1][0], strict=True):
        assert_same_bits(one.detach(), other.detach(), needs_root=True)


def test_a_gradient_that_is_lazily_negated() -> None:
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.tensor([1 + 2j]).conj().imag
    assert param.grad.is_neg()
    optim.SGD([param], lr=0.5).step()
    assert param.item() == 2.0


def test_each_list_of_parameters_keeps_its_plan() -> None:
    """A plan follows each list of parameters: `offload_parameters` steps on one group of them after another."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(8)]
    optimizer = optim.AdamW(params)
    made = []
    for _ in range(4):
        for param in params:
            param.grad = torch.ones(3)
        for begin in range(0, 8, 2):
            optimizer.param_groups[0]["params"] = params[begin : begin + 2]
            optimizer.step()
        made.append(optimizer._plans.made)
    assert made == [4, 4, 4, 4]
    assert {optimizer.state[param]["step"].item() for param in params} == {4.0}
