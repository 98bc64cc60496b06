"""Updates in the backward pass equal a step after it bit for bit, and read less."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme import optim
from deepnvme.errors import ClosedError

from .test_training import (
    KINDS,
    MEMORY,
    WIDTH,
    Block,
    Model,
    Twins,
    assert_same,
    batches,
    closure_of,
    loss_of,
    train,
    twins,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# A fixture, re-exported for pytest.
__all__ = ["twins"]


def with_optimizers(
    plain: nn.Module, twin: nn.Module, offloading: Any, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> Iterator[tuple[nn.Module, Any]]:
    """Return both models with their optimizers and the same seed; the optimizer of the offloaded one is attached."""
    for one in (plain, twin):
        optimizer = make(one)
        if one is twin:
            offloading.attach(optimizer, in_backward=True)
        torch.manual_seed(2)
        yield one, optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def gradients(model: nn.Module) -> int:
    return sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_the_same_bits_with_less_read(twins: Twins, tmp_path: Path, kind: str, cast: torch.dtype | None) -> None:
    plain, twin, offloading = twins(**KINDS[kind])
    _, other, behind = twins(**KINDS[kind])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin, other)]
    offloading.attach(optimizers[1], in_backward=True)
    behind.attach(optimizers[2])
    expected = train(plain, optimizers[0], cast=cast)
    assert train(twin, optimizers[1], cast=cast) == expected
    assert train(other, optimizers[2], cast=cast) == expected
    assert_same(plain, twin)
    less, more = offloading.stats(), behind.stats()
    assert less.resident_bytes_peak <= MEMORY
    # 0.59 of it on an idle machine. Late writes change what is evicted.
    assert less.bytes_read < more.bytes_read
    assert less.bytes_written <= 1.1 * more.bytes_written
    offloading.close()
    # A step of the same optimizer continues in memory.
    assert train(twin, optimizers[1], 2, accumulate=2, clip=0.5) == train(
        plain, optimizers[0], 2, accumulate=2, clip=0.5
    )
    assert_same(plain, twin)


OURS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"moments": "8bit", "stochastic_rounding": True, "seed": 3}),
    ("Lion", {"moments": "bf16"}),
    ("SGD", {"momentum": 0.9}),
    ("Adagrad", {}),
]


@pytest.mark.parametrize("where", ["memory", "disk", "disk, gradients too"])
@pytest.mark.parametrize(("name", "options"), OURS)
def test_our_optimizers(twins: Twins, tmp_path: Path, name: str, options: dict[str, Any], where: str) -> None:
    plain, twin, offloading = twins()
    on_disk: dict[str, Any] = {} if where == "memory" else {"swap_dir": tmp_path, "memory": 1 << 20}
    if where == "disk, gradients too":
        on_disk["swap_gradients"] = True
    kind = getattr(optim, name)
    optimizers = [
        kind(plain.parameters(), lr=1e-2, **options),
        kind(twin.parameters(), lr=1e-2, **options, **on_disk),
    ]
    offloading.attach(optimizers[1], in_backward=True)
    assert train(twin, optimizers[1]) == train(plain, optimizers[0])
    assert_same(plain, twin)
    expected, found = (one.state_dict()["state"] for one in optimizers)
    for index, state in expected.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found[index][key]), torch.as_tensor(value)), (index, key)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adafactor"])
def test_torchs_optimizers_and_groups(twins: Twins, name: str) -> None:
    plain, twin, offloading = twins()
    optimizers = []
    for one in (plain, twin):
        decay = [parameter for parameter in one.parameters() if parameter.ndim > 1]
        rest = [parameter for parameter in one.parameters() if parameter.ndim == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}]
        optimizers.append(getattr(torch.optim, name)(groups, lr=1e-2))
    offloading.attach(optimizers[1], in_backward=True)
    assert train(twin, optimizers[1]) == train(plain, optimizers[0])
    assert_same(plain, twin)
    assert [len(group["params"]) for group in optimizers[1].param_groups] == [len(decay), len(rest)]


def test_gradients_are_freed_as_they_come(twins: Twins) -> None:
    _, twin, offloading = twins()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    offloading.attach(optimizer, in_backward=True)
    highest = 0

    def look(_param: torch.Tensor) -> None:
        nonlocal highest
        highest = max(highest, gradients(twin))

    for one in twin.parameters():
        one.register_post_accumulate_grad_hook(look)
    for words in batches(3):
        loss_of(twin, words).backward()  # type: ignore[no-untyped-call]
        assert gradients(twin) <= 4096, "of what is in memory for good"
        optimizer.step()
        optimizer.zero_grad()
    largest = max(sum(one.nbytes for one in block.parameters()) for block in twin.blocks)
    embedding = twin.embed.weight.nbytes
    assert 0 < highest <= largest + embedding + 4096
    assert highest < offloading.parameter_bytes / 3


class Repeated(nn.Module):
    """One block called repeatedly, as in ALBERT, between two that are called once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Block(is_checkpointed=None) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 1, 1, 2):
            if self.how == "plain":
                hidden = self.blocks[index](hidden)
            else:
                is_reentrant = self.how == "reentrant"
                hidden = checkpoint(self.blocks[index], hidden, use_reentrant=is_reentrant)
        return hidden


@pytest.mark.parametrize("how", ["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_block_that_is_called_again(twins: Twins, how: str, to_none: bool) -> None:
    """Its gradients are complete after its last call."""
    torch.manual_seed(1)
    plain, twin, offloading = twins(Repeated(how), memory=2 * 4 * (8 * WIDTH * WIDTH + 8 * WIDTH))
    found = []
    for one, optimizer in with_optimizers(plain, twin, offloading, adamw):
        losses: list[float] = []
        for _ in range(4):
            hidden = torch.randn(2, 3, WIDTH, requires_grad=True)
            # Two forward passes and one backward pass, every other time.
            loss = one(hidden).square().mean()
            if len(losses) % 2:
                loss = loss + one(hidden + 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == found[1]
    assert_same(plain, twin)


class Branching(nn.Module):
    """Each block has a part that is never used. Next to each is a gate that is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"always": nn.Linear(WIDTH, WIDTH), "never": nn.Linear(WIDTH, WIDTH)}) for _ in range(3)
        )
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor, *, is_even: bool) -> torch.Tensor:
        for block, gate in zip(self.blocks, self.gates, strict=True):
            assert isinstance(block, nn.ModuleDict)
            hidden = block["always"](hidden).tanh()
            if is_even:
                hidden = hidden + gate(hidden)
        return hidden


def test_parameters_without_gradients(twins: Twins) -> None:
    torch.manual_seed(1)
    plain, twin, offloading = twins(Branching(), memory=6 * 4 * (WIDTH * WIDTH + WIDTH))
    found = []
    for one, optimizer in with_optimizers(plain, twin, offloading, adamw):
        losses = []
        for step in range(6):
            loss = one(torch.randn(2, WIDTH), is_even=step % 2 == 0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == found[1]
    assert_same(plain, twin)


def test_frozen_parameters(twins: Twins) -> None:
    torch.manual_seed(1)
    model = Model()
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index % 2 == 0)
    plain, twin, offloading = twins(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    offloading.attach(optimizers[1], in_backward=True)
    assert train(twin, optimizers[1]) == train(plain, optimizers[0])
    assert_same(plain, twin)


def test_two_optimizers(twins: Twins) -> None:
    """Each optimizer has a part of one block; only one of them steps in the backward pass."""
    plain, twin, offloading = twins()
    found = []
    for one in (plain, twin):
        some = [parameter for name, parameter in one.named_parameters() if "up." in name]
        rest = [parameter for name, parameter in one.named_parameters() if "up." not in name]
        pair = [torch.optim.AdamW(some, lr=1e-2), torch.optim.SGD(rest, lr=1e-1)]
        if one is twin:
            offloading.attach(pair[0], in_backward=True)
            offloading.attach(pair[1])
        losses = []
        for words in batches(4):
            loss = loss_of(one, words)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1]
    assert_same(plain, twin)


def test_a_closure(twins: Twins) -> None:
    plain, twin, offloading = twins()
    found = []
    for one, optimizer in with_optimizers(plain, twin, offloading, adamw):
        found.append([optimizer.step(closure_of(one, optimizer)).item() for _ in range(4)])
    assert found[0] == found[1]


def test_evaluation_and_saving_between(twins: Twins, tmp_path: Path) -> None:
    plain, twin, offloading = twins()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    offloading.attach(optimizers[1], in_backward=True)
    words = batches(4)
    for each in words:
        for one, optimizer in zip((plain, twin), optimizers, strict=True):
            loss_of(one, each).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(plain(each), twin(each))
        # Gradients of a part of it, which update nothing.
        found = [torch.autograd.grad(loss_of(one, words[0]), [one.blocks[3].up.weight])[0] for one in (plain, twin)]
        assert torch.equal(found[0], found[1])
        assert_same(plain, twin)
    # The forward passes without gradients have changed the recorded order of groups; the next steps restore it.
    train(twin, optimizers[1], 2)
    before = offloading.stats().bytes_read
    train(twin, optimizers[1], 1)
    assert offloading.stats().bytes_read - before < 2.2 * offloading.parameter_bytes, "it is as quick as before"


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train without a scheduler, which would wrap the optimizer's ``step``."""
    for batch in batches(3):
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_close_gives_the_optimizer_its_step_back(twins: Twins, *, in_backward: bool, has_scheduler: bool) -> None:
    _, twin, offloading = twins()
    optimizer = adamw(twin)
    if has_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = dict(vars(optimizer))
    offloading.attach(optimizer, in_backward=in_backward)
    steps(twin, optimizer)
    offloading.close()
    assert vars(optimizer).get("step") == before.get("step")
    assert vars(optimizer).get("_step_supports_amp_scaling") == before.get("_step_supports_amp_scaling")
    assert not any(one._post_accumulate_grad_hooks for one in twin.parameters())
    steps(twin, optimizer)


def test_a_step_that_has_begun_ends_after_a_close(twins: Twins) -> None:
    plain, twin, offloading = twins()
    for one, optimizer in with_optimizers(
        plain, twin, offloading, lambda model: optim.AdamW(model.parameters(), lr=1e-2)
    ):
        for batch in batches(3):
            loss_of(one, batch).backward()  # type: ignore[no-untyped-call]
            if one is twin:
                offloading.close()
            optimizer.step()
            optimizer.zero_grad()
        assert "step" not in vars(optimizer)
    assert_same(plain, twin)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_closed_optimizer_is_detached(
    twins: Twins, tmp_path: Path, *, in_backward: bool, swaps: bool, is_begun: bool
) -> None:
    _, twin, offloading = twins()
    closed = optim.SGD(twin.parameters(), lr=0.1, swap_dir=tmp_path, memory="1MiB", swap_gradients=swaps)
    offloading.attach(closed, in_backward=in_backward)
    steps(twin, closed)
    if is_begun:
        loss_of(twin, batches(1)[0]).backward()  # type: ignore[no-untyped-call]
    closed.close()
    assert "step" not in vars(closed)
    assert not any(one._post_accumulate_grad_hooks for one in twin.parameters())
    with pytest.raises(ClosedError):
        closed.step()
    other = adamw(twin)
    offloading.attach(other, in_backward=in_backward)
    other.zero_grad()
    steps(twin, other)
    offloading.close()


def test_a_wrapper_around_a_forward_outlives_offloading(twins: Twins) -> None:
    plain, twin, offloading = twins()
    # As libraries do that wrap a model's `forward` after it was offloaded.
    for module in twin.modules():
        if "forward" in vars(module):
            module.forward = functools.partial(module.forward)
    offloading.close()
    for one in (plain, twin):
        steps(one, adamw(one))
    assert_same(plain, twin)
