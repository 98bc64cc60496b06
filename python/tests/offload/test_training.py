"""Training with parameters on disk equals training in memory bit for bit."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepnvme

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, DEPTH, WORDS = 64, 6, 97
# Three of the blocks.
MEMORY = 3 * 4 * (4 * WIDTH * WIDTH * 2 + 8 * WIDTH)


class Block(nn.Module):
    def __init__(self, *, is_checkpointed: bool | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.is_checkpointed = is_checkpointed

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))
        return answer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed is None:
            return self.inner(hidden)
        answer: torch.Tensor = checkpoint(self.inner, hidden, use_reentrant=self.is_checkpointed)
        return answer


class Model(nn.Module):
    """A tiny language model whose head is tied to its embedding."""

    def __init__(self, *, is_checkpointed: bool | None = None, is_outside: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            Block(is_checkpointed=None if is_outside else is_checkpointed) for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = is_checkpointed if is_outside else None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            if self.checkpointed is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointed)
        answer: torch.Tensor = self.head(self.norm(hidden))
        return answer


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, WORDS, (3, 11), generator=generator) for _ in range(count)]


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    """Make a closure for ``step`` that computes the loss of one batch and its gradients."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batches(1)[0])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    logits = model(words[:, :-1])
    return torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 6,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    cast: torch.dtype | None = None,
) -> list[float]:
    losses = []
    words = iter(batches(steps * accumulate))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(steps):
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
                loss = loss_of(model, next(words))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture
def twins(tmp_path: Path) -> Callable[..., tuple[nn.Module, nn.Module, Any]]:
    """The same model twice, one of them offloaded."""

    def make(model: nn.Module | None = None, memory: int = MEMORY, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
        torch.manual_seed(1)
        plain = Model(**options) if model is None else model
        twin = copy.deepcopy(plain)
        return plain, twin, deepnvme.offload_parameters(twin, memory=memory, swap_dir=tmp_path)

    return make


Twins = Any


def assert_same(plain: nn.Module, twin: nn.Module) -> None:
    theirs, ours = plain.state_dict(), twin.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed inside": {"is_checkpointed": False},
    "checkpointed inside, reentrant": {"is_checkpointed": True},
    "checkpointed outside": {"is_checkpointed": False, "is_outside": True},
    "checkpointed outside, reentrant": {"is_checkpointed": True, "is_outside": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_the_same_bits(twins: Twins, kind: str, cast: torch.dtype | None) -> None:
    plain, twin, offloading = twins(**KINDS[kind])
    assert offloading.parameter_bytes > 2 * MEMORY
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    offloading.attach(optimizers[1])
    expected = train(plain, optimizers[0], cast=cast)
    assert train(twin, optimizers[1], cast=cast) == expected
    assert expected[-1] < expected[0]
    assert_same(plain, twin)
    stats = offloading.stats()
    assert stats.resident_bytes_peak <= MEMORY
    assert stats.bytes_read > 6 * offloading.parameter_bytes
    offloading.close()
    assert_same(plain, twin)
    assert train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 1) == train(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1
    ), "it is as it was before"


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "Adafactor"])
def test_other_optimizers_accumulation_and_clipping(twins: Twins, name: str) -> None:
    plain, twin, offloading = twins()
    optimizers = [getattr(torch.optim, name)(one.parameters(), lr=1e-2) for one in (plain, twin)]
    offloading.attach(optimizers[1])
    expected = train(plain, optimizers[0], accumulate=3, clip=0.5)
    assert train(twin, optimizers[1], accumulate=3, clip=0.5) == expected
    assert_same(plain, twin)


def test_frozen_parameters_are_written_once(twins: Twins) -> None:
    """A frozen model with small trained additions, as in LoRA."""

    class Added(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = self.base(hidden) + self.up(self.down(hidden))
            return answer

    torch.manual_seed(1)
    model = Model().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up, block.down = Added(block.up), Added(block.down)  # type: ignore[assignment]
    plain, twin, offloading = twins(model)
    optimizers = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in (plain, twin)]
    offloading.attach(optimizers[1])
    expected = train(plain, optimizers[0], 2)
    assert train(twin, optimizers[1], 2) == expected
    written = offloading.stats().bytes_written
    train(plain, optimizers[0], 3)
    train(twin, optimizers[1], 3)
    assert_same(plain, twin)
    frozen = sum(group.nbytes for group in offloading._groups if group.is_frozen)
    trained = offloading.parameter_bytes - frozen
    assert frozen > 10 * trained
    assert offloading.stats().bytes_written - written <= 3 * 2 * (trained + 4096 * DEPTH)


def test_gradients_of_inputs_and_functions(twins: Twins) -> None:
    plain, twin, _ = twins()
    hidden = torch.randn(2, 5, WIDTH)
    found = []
    for one in (plain, twin):
        assert isinstance(one, Model)
        leaf = hidden.clone().requires_grad_()
        out = leaf
        for block in one.blocks:
            out = block(out)
        # Twice through the same graph, and some gradients by name.
        first = torch.autograd.grad(out.square().mean(), [leaf, *one.blocks[2].parameters()], retain_graph=True)
        second = torch.autograd.grad(out.sum(), [leaf])
        found.append([*first, *second])
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)


def test_evaluation_between_steps(twins: Twins) -> None:
    plain, twin, offloading = twins()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    offloading.attach(optimizers[1])
    for _ in range(2):
        assert train(twin, optimizers[1], 2) == train(plain, optimizers[0], 2)
        with torch.no_grad():
            for words in batches(3):
                assert torch.equal(plain(words), twin(words))
        with torch.inference_mode():
            assert torch.equal(plain(words), twin(words))


def test_the_order_is_learnt(twins: Twins) -> None:
    """From the second step on, all but the first blocks are in memory or being read when they are called."""
    _, twin, offloading = twins()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    offloading.attach(optimizer)
    train(twin, optimizer, 3)
    residence = offloading._residence
    held = DEPTH + 2
    assert len(residence._order) >= 3 * held - 2, "forward, backward, and the optimizer's step"
    before = list(residence._order)
    train(twin, optimizer, 2)
    assert residence._order == before


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_scheduler_from_before_the_attachment_does_not_warn(tmp_path: Path, in_backward: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    offloading = deepnvme.offload_parameters(model, memory="64KB", swap_dir=tmp_path)
    try:
        offloading.attach(optimizer, in_backward=in_backward)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] == 0.5**4
    finally:
        offloading.close()
