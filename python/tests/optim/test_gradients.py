"""Gradients on disk equal gradients in memory bit for bit; their placeholders."""

from __future__ import annotations

import errno
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme import optim
from deepnvme._swap import Swapper
from deepnvme.errors import Error, UnsupportedError

from .nets import KINDS, MEMORY, Net, assert_same_parameters, groups, train, twins

if TYPE_CHECKING:
    from pathlib import Path


def pair(tmp_path: Path, kind: Any, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    one, other = twins(dtype)
    mine = kind(groups(one), **settings, swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    return one, mine, other, kind(groups(other), **settings)


def image(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(tmp_path: Path, kind: Any, settings: dict[str, Any], dtype: torch.dtype) -> None:
    one, mine, other, his = pair(tmp_path, kind, settings, dtype)
    train(one, mine, range(6))
    train(other, his, range(6))
    assert_same_parameters(one, other)
    assert all(param.grad is None for param in one.parameters()), "a step has used them"
    stats = mine.swap_stats()
    assert stats.resident_bytes_peak <= MEMORY
    assert stats.bytes_written > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation(tmp_path: Path, dtype: torch.dtype) -> None:
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3}, dtype)
    for step in range(4):
        for net, optimizer in ((one, mine), (other, his)):
            for micro in range(3):
                net(image(10 * step + micro).to(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(one, other)


def test_no_gradient_stays_in_memory(tmp_path: Path) -> None:
    one, mine, other, _ = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    one(image(1)).square().mean().backward()
    other(image(1)).square().mean().backward()
    held = sum(p.grad.untyped_storage().nbytes() for p in one.parameters() if type(p.grad) is torch.Tensor)
    assert held == 0
    for (name, param), his in zip(one.named_parameters(), other.parameters(), strict=True):
        if his.grad is None:
            assert param.grad is None, name
            continue
        assert type(param.grad) is not torch.Tensor
        assert param.grad is not None
        assert (param.grad.shape, param.grad.dtype) == (his.grad.shape, his.grad.dtype)
        copy = param.grad.clone()
        assert type(copy) is torch.Tensor
        assert torch.equal(copy, his.grad), name
        # Readers get a copy.
        assert torch.equal(param.grad.abs().max(), his.grad.abs().max())
        assert torch.equal(param.grad + 1, his.grad + 1)
        torch.testing.assert_close(param.grad.norm(), his.grad.norm())
        torch.testing.assert_close(torch.linalg.vector_norm(param.grad, 1), torch.linalg.vector_norm(his.grad, 1))
        assert "on disk" in repr(param.grad)
        with pytest.raises(UnsupportedError, match=r"clone\(\)"):
            param.grad.zero_()
    assert mine.swap_stats().stored_bytes > 0
    mine.zero_grad()
    assert all(param.grad is None for param in one.parameters())
    assert mine.swap_stats().stored_bytes == 0, "what was dropped takes no room"


@pytest.mark.parametrize("foreach", [None, False])
def test_clipping(tmp_path: Path, foreach: bool | None) -> None:
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-2})
    for step in range(4):
        norms = []
        for net, optimizer in ((one, mine), (other, his)):
            net(image(step)).square().mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3, foreach=foreach))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*norms)
        assert norms[0] > 1e-3, "it was clipped"
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_one, his_one, rtol=1e-4, atol=1e-6)


def test_clipping_within_the_step(tmp_path: Path) -> None:
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-2, "max_norm": 1e-3})
    train(one, mine, range(4))
    train(other, his, range(4))
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_one, his_one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scaler(tmp_path: Path, unscales: bool) -> None:
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    before = [param.detach().clone() for param in one.parameters()]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(5):
        for net, optimizer, scaler in ((one, mine, scalers[0]), (other, his, scalers[1])):
            loss = net(image(step)).square().mean()
            if step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same_parameters(one, other)
    assert scalers[0].get_scale() == 512.0
    assert not all(torch.equal(was, param) for was, param in zip(before, one.parameters(), strict=True))


def test_a_gradient_of_ones_own(tmp_path: Path) -> None:
    """`.grad` decides: a tensor assigned to it, or None."""
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    for net, optimizer in ((one, mine), (other, his)):
        net(image(1)).square().mean().backward()
        net.zero_grad()  # of the module, which knows nothing of disks
        net(image(2)).square().mean().backward()
        net.first.weight.grad = torch.ones_like(net.first.weight)
        net.last.weight.grad = None
        optimizer.step()
        net.zero_grad()
        net(image(3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(one, other)


def test_parameters_added_later(tmp_path: Path) -> None:
    one, other = twins()
    place: dict[str, Any] = {"swap_dir": tmp_path, "memory": MEMORY, "swap_gradients": True}
    optimizers = []
    for net, more in ((one, place), (other, {})):
        optimizer = optim.AdamW(net.lines.parameters(), lr=1e-3, **more)
        optimizers.append(optimizer)
        train(net, optimizer, range(2))
        net.zero_grad()
        optimizer.add_param_group({"params": [*net.first.parameters(), *net.last.parameters()], "lr": 1e-2})
        train(net, optimizer, range(2, 4))
    assert_same_parameters(one, other)
    one(image(1)).square().mean().backward()
    assert one.first.weight.grad is not None
    assert "on disk" in repr(one.first.weight.grad)


def test_settings_that_change_meanwhile(tmp_path: Path) -> None:
    """More state is needed while gradients are on disk."""
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    for net, optimizer in ((one, mine), (other, his)):
        train(net, optimizer, range(2))
        optimizer.zero_grad()
        net(image(5)).square().mean().backward()
        optimizer.param_groups[0]["amsgrad"] = True
        optimizer.step()
        train(net, optimizer, range(5, 7))
    assert_same_parameters(one, other)


def test_parameters_gradients_and_state_on_disk(tmp_path: Path) -> None:
    """Each of the three exceeds its memory."""
    one, other = twins()
    offloading = deepnvme.offload_parameters(one, memory="512KiB", swap_dir=tmp_path)
    mine: Any = optim.AdamW(one.parameters(), lr=1e-3, swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    offloading.attach(mine)
    his = optim.AdamW(other.parameters(), lr=1e-3)
    size = sum(param.nbytes for param in other.parameters())
    assert size > offloading.memory_bytes > mine.swap_stats().memory_bytes
    for step in range(5):
        for net, optimizer in ((one, mine), (other, his)):
            for micro in range(2):
                net(image(10 * step + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], tensor), name
    assert mine.swap_stats().resident_bytes_peak <= MEMORY
    offloading.close()


def test_tied_parameters(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        first, last = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, nn.Linear(40, 40), last)

    one, other = model(), model()
    mine = optim.AdamW(one.parameters(), lr=1e-2, swap_dir=tmp_path, memory="64KiB", swap_gradients=True)
    his = optim.AdamW(other.parameters(), lr=1e-2)
    words = torch.arange(30).view(3, 10)
    for _ in range(4):
        for net, optimizer in ((one, mine), (other, his)):
            net(words).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine_one, his_one)


def test_an_optimizer_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    net = Net()
    optimizer = optim.AdamW(net.parameters(), swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    train(net, optimizer, range(1))
    del optimizer
    gc.collect()
    net(image(1)).square().mean().backward()
    assert type(net.first.weight.grad) is torch.Tensor


def test_a_partially_accumulated_gradient_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    one(image(1)).square().mean().backward()
    real, borrows = Swapper.borrow, []

    def borrow(self: Swapper, key: str, *, shared: bool = False) -> Any:
        borrows.append(key)
        if len(borrows) == 8:
            raise Error(errno.EIO, "read at offset 0: Input/output error", "swap")
        return real(self, key, shared=shared)

    with monkeypatch.context() as patch:
        patch.setattr(Swapper, "borrow", borrow)
        with pytest.raises(Error, match="Input/output"):
            one(image(2)).square().mean().backward()
    with pytest.raises(UnsupportedError, match="zero_grad"):
        mine.step()
    assert all(float(state["step"]) == 0 for state in mine.state.values())
    mine.zero_grad()
    train(one, mine, range(3))
    train(other, his, range(3))
    assert_same_parameters(one, other)


def test_refusals(tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(ValueError, match="needs a folder"):
        optim.AdamW(net.parameters(), swap_gradients=True)
    optimizer = optim.AdamW(net.parameters(), swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    net(image(1)).square().mean().backward()
    gone = net.first.weight.grad
    assert gone is not None
    optimizer.step()
    with pytest.raises(UnsupportedError, match="a step has used it"):
        gone.clone()


CHANGES: dict[str, Any] = {
    "assignment": lambda grad: grad.__setitem__(0, 0.0),
    "assignment by a mask": lambda grad: grad.__setitem__(torch.arange(10) < 3, 0.0),
    "row": lambda grad: grad[0].zero_(),
    "data": lambda grad: grad.data.__setitem__(0, 0.0),
    "view": lambda grad: grad.view(-1).mul_(0),
    "view of a view": lambda grad: grad.view(-1)[3:].select(0, 1).fill_(0),
    "transposed": lambda grad: grad.t().zero_(),
    "rows": lambda grad: [row.mul_(0) for row in grad],
    "parts": lambda grad: grad.chunk(2)[0].zero_(),
    "flat": lambda grad: grad.flatten().zero_(),
    "reshaped": lambda grad: grad.reshape(-1).add_(1),
    "operator": lambda grad: grad[0].__iadd__(1),
    "out": lambda grad: torch.mul(torch.ones(4), 0, out=grad[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_part_of_a_gradient_are_refused(tmp_path: Path, change: str) -> None:
    embedding = nn.Embedding(10, 4)
    before = embedding.weight.detach().clone()
    optimizer = optim.SGD(embedding.parameters(), lr=1.0, swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    embedding(torch.arange(10)).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    with pytest.raises(UnsupportedError, match=r"param\.grad = param\.grad\.clone"):
        CHANGES[change](gradient)
    # Views can be read, and computed with.
    assert gradient.view(-1).norm() == 40**0.5
    assert float(torch.cat([gradient[0], gradient.flatten()[:3]]).add_(1).sum()) == 14
    optimizer.step()
    assert torch.equal(embedding.weight, before - 1)
    optimizer.close()


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("is_made_before", [False, True])
@pytest.mark.parametrize("next_one", ["torch", "memory", "disk"])
def test_a_closed_optimizer_leaves_no_trace(
    tmp_path: Path, *, is_pending: bool, is_made_before: bool, next_one: str
) -> None:
    param: Any = nn.Parameter(torch.arange(1000.0))
    plain: Any = nn.Parameter(torch.arange(1000.0))
    disk: dict[str, Any] = {"swap_dir": tmp_path, "memory": MEMORY}
    make: Any = {
        "torch": lambda: torch.optim.SGD([param], lr=0.1),
        "memory": lambda: optim.SGD([param], lr=0.1, **disk),
        "disk": lambda: optim.SGD([param], lr=0.1, **disk, swap_gradients=True),
    }[next_one]
    closed = optim.SGD([param], lr=0.1, **disk, swap_gradients=True)
    other = make() if is_made_before else None
    (param * 2).sum().backward()
    closed.step()
    if is_pending:
        (param * 2).sum().backward()
    closed.close()
    assert param.grad is None
    assert not param._post_accumulate_grad_hooks or is_made_before
    closed.zero_grad()
    closed.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    other = other or make()
    expected = torch.optim.SGD([plain], lr=0.1)
    (plain * 2).sum().backward()
    expected.step()
    expected.zero_grad()
    for net, optimizer in ((param, other), (plain, expected)):
        for _ in range(2):
            (net * 3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(param, plain)
    closed.close()


def test_a_dropped_optimizer_leaves_no_hook(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(10))
    dropped = optim.SGD([param], lr=0.1, swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    del dropped
    gc.collect()
    assert not param._post_accumulate_grad_hooks
