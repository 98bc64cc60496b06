"""Refusals of updates in the backward pass, and failures half way."""

from __future__ import annotations

import errno
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme import optim
from deepnvme.errors import StepStoppedError, UnsupportedError

from .test_training import DEPTH, MEMORY, Model, Twins, assert_same, batches, loss_of, train, twins

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["twins"]


def small(tmp_path: Path) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Model()
    return model, deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)


def test_gradients_of_several_passes_are_refused(tmp_path: Path) -> None:
    model, offloading = small(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    offloading.attach(optimizer, in_backward=True)
    words = batches(1)[0]
    loss_of(model, words).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) after each backward\(\)"):
        loss_of(model, words)
    optimizer.step()
    loss = loss_of(model, words)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="was changed after the forward pass"):
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    train(model, optimizer, 1)


def test_options_that_need_all_gradients_are_refused(tmp_path: Path) -> None:
    model, offloading = small(tmp_path)
    with pytest.raises(UnsupportedError, match="max_norm"):
        offloading.attach(optim.AdamW(model.parameters(), max_norm=1.0), in_backward=True)
    with pytest.raises(UnsupportedError, match="LBFGS"):
        offloading.attach(torch.optim.LBFGS(model.parameters()), in_backward=True)


# Two processes of torch.distributed. The second parameter has no gradient before the first has been updated.
AVERAGED = """
import sys, torch, deepnvme
from torch import nn
store = f"file://{sys.argv[1]}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
before = [param.detach().clone() for param in model.parameters()]
offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
offloading.attach(optimizer, in_backward=True)
parallel(torch.randn(2, 300) * (1 + int(sys.argv[2]))).sum().backward()
try:
    optimizer.step()
except deepnvme.errors.UnsupportedError as error:
    assert "attach without in_backward" in str(error)
with offloading.gathered(list(model.parameters())):
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
print("refused")
"""


def test_gradients_that_are_averaged_later_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AVERAGED, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["refused\n"] * 2


@pytest.mark.parametrize("kind", [optim.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_is_refused(tmp_path: Path, kind: Any, unscales: bool) -> None:
    model, offloading = small(tmp_path)
    # Leaves a gradient for the scaler: without one it raises an error of its own.
    other = nn.Parameter(torch.ones(3))
    optimizer = kind([*model.parameters(), other])
    offloading.attach(optimizer, in_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    loss = loss_of(model, batches(1)[0]) + other.sum()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.step(optimizer)


def test_an_optimizer_is_attached_once(tmp_path: Path) -> None:
    model, offloading = small(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    offloading.attach(optimizer, in_backward=True)
    with pytest.raises(UnsupportedError, match="attached already"):
        offloading.attach(optimizer)
    train(model, optimizer, 1)
    offloading.close()
    # Again after offloading was closed.
    deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path).attach(optimizer, in_backward=True)
    train(model, optimizer, 2)


def test_a_change_between_forward_and_backward(tmp_path: Path) -> None:
    model, offloading = small(tmp_path)
    loss = loss_of(model, batches(1)[0])
    with offloading.gathered(model.blocks[2].parameters(), write=True), torch.no_grad():
        model.blocks[2].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"blocks\.2.* was changed after the forward pass"):
        loss.backward()  # type: ignore[no-untyped-call]
    train(model, _attached(model, offloading), 1)


def _attached(model: nn.Module, offloading: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    offloading.attach(optimizer, in_backward=True)
    return optimizer


# Failures half way.


class Failing:
    """Passes some calls, then fails like a disk, then works again."""

    def __init__(self, call: Callable[..., Any], begin: int, count: int) -> None:
        self.call, self.begin, self.end = call, begin, begin + count
        self.calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.begin < self.calls <= self.end:
            raise OSError(errno.EIO, "Input/output error", "/mnt/nvme/swap")
        return self.call(*arguments, **options)


@pytest.mark.parametrize("begin", range(1, 3 * (DEPTH + 2), 3))
@pytest.mark.parametrize("count", [1, 2])
def test_a_disk_that_fails_for_a_moment(
    twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int, count: int
) -> None:
    """The step does what failed in the backward pass; if it fails too, its next call does."""
    plain, twin, offloading = twins()
    optimizers = [
        optim.AdamW(plain.parameters(), lr=1e-2),
        optim.AdamW(twin.parameters(), lr=1e-2, swap_dir=tmp_path, memory=1 << 20),
    ]
    offloading.attach(optimizers[1], in_backward=True)
    store: Any = optimizers[1]._store
    failing = Failing(store.lease_memory, begin, count)
    monkeypatch.setattr(store, "lease_memory", failing)
    stopped = 0
    for words in batches(4):
        losses = []
        for one, optimizer in zip((plain, twin), optimizers, strict=True):
            loss = loss_of(one, words)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            try:
                optimizer.step()
            except StepStoppedError as error:
                stopped += 1
                assert "goes on where it stopped" in str(error)
                with pytest.raises(RuntimeError, match="stopped half way"):
                    optimizer.state_dict()
                optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == losses[1]
    assert failing.calls > failing.end
    # The backward pass swallows one failure, unless the step itself fails.
    assert stopped in {0, count - 1, 1}
    assert_same(plain, twin)


def test_parameters_that_cannot_be_read_for_a_moment(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, twin, offloading = twins()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    offloading.attach(optimizers[1], in_backward=True)
    residence, hold = offloading._residence, offloading._residence.hold
    failures = 0

    def held(unit: Any, holder: Any, *, exclusive: bool = False, **options: Any) -> None:
        nonlocal failures
        if exclusive and unit.members[0].name.startswith("blocks.3") and failures == 0:
            failures += 1
            raise OSError(errno.EIO, "Input/output error", "/mnt/nvme/swap")
        hold(unit, holder, exclusive=exclusive, **options)

    monkeypatch.setattr(residence, "hold", held)
    assert train(twin, optimizers[1]) == train(plain, optimizers[0])
    assert failures == 1
    assert_same(plain, twin)


@pytest.mark.parametrize("kind", [optim.AdamW, torch.optim.AdamW])
def test_ctrl_c_in_a_backward_pass(twins: Twins, interrupted: Any, kind: Any) -> None:
    """Follow the advice of the message, ``optimizer.step()``: no parameter is updated twice."""
    lr, words = 1e-2, batches(3)

    def begun() -> tuple[nn.Module, Any, nn.Module, Any, Any]:
        plain, twin, offloading = twins()
        optimizers = [kind(one.parameters(), lr=lr, weight_decay=0.0) for one in (plain, twin)]
        offloading.attach(optimizers[1], in_backward=True)
        for one, optimizer in zip((plain, twin), optimizers, strict=True):
            loss_of(one, words[0]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return plain, optimizers[0], twin, optimizers[1], offloading

    _, _, twin, _, offloading = begun()
    with interrupted() as points:
        loss_of(twin, words[1]).backward()  # type: ignore[no-untyped-call]
    offloading.close()
    stopped = 0
    for point in range(1, points.count, max(points.count // 20, 1)):
        plain, optimizer, twin, his, offloading = begun()
        before = {name: param.detach().clone() for name, param in plain.named_parameters()}
        loss_of(plain, words[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss = loss_of(twin, words[1])
        try:
            with interrupted(point):
                loss.backward()  # type: ignore[no-untyped-call]
        except KeyboardInterrupt:
            stopped += 1
        his.step()
        his.zero_grad()
        state = twin.state_dict()
        for name, param in plain.named_parameters():
            found, where = state[name], f"{name}, interrupted at point {point} of {points.count}"
            is_whole = torch.equal(found, before[name]) or torch.equal(found, param)
            # If the head is tied to the embedding, half of the gradient may exist.
            assert is_whole or name == "embed.weight", where
            assert (found - before[name]).abs().max() < 1.2 * lr, where
        loss_of(twin, words[2]).backward()  # type: ignore[no-untyped-call]
        his.step()
        offloading.close()
    # A pass that waits for the disk elsewhere has other points, and fewer. Most were reached.
    assert stopped > 4


def test_ctrl_c_anywhere_holds_nothing_for_good(twins: Twins, interrupted: Any) -> None:
    """Groups that nobody releases could never be changed again."""
    _, twin, offloading = twins()
    own = list(twin.parameters())[:1]

    def gather() -> None:
        with offloading.gathered(own):
            pass

    def change() -> None:
        with offloading.gathered(own, write=True), torch.no_grad():
            own[0].add_(1)

    gather()
    change()
    with interrupted() as points:
        gather()
    assert points.count > 10
    stopped = 0
    for point in range(1, points.count + 1):
        change()
        try:
            with interrupted(point):
                gather()
        except KeyboardInterrupt:
            stopped += 1
        change()
    assert stopped > points.count - 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_is_released_after_an_interrupt_although_its_traceback_lives(twins: Twins, interrupted: Any) -> None:
    """A notebook keeps the traceback of Ctrl-C, and with it the frames of the calls."""
    hooks_before = torch._C._autograd._top_saved_tensors_default_hooks(False)
    _, twin, offloading = twins()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    offloading.attach(optimizer)
    data = batches(1)[0]

    def work() -> None:
        loss_of(twin, data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    work()
    with interrupted() as points:
        work()
    tracebacks = []
    for point in range(1, points.count, max(points.count // 150, 1)):
        with pytest.raises(KeyboardInterrupt) as caught, interrupted(point):
            work()
            raise KeyboardInterrupt  # this pass had fewer points
        tracebacks.append(caught)
        torch.set_grad_enabled(True)
        optimizer.zero_grad()
        work()
    assert len(tracebacks) > 50
    offloading.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) == hooks_before
