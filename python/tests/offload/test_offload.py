"""``deepnvme.offload``: weights, gradients, state and activations under one bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepnvme
from deepnvme.errors import UnsupportedError
from process_memory import memory_bytes, restart_peak

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 128
# A fraction of what the models below need: 1.6 MB of weights, as much of gradients, and twice as much of state.
MEMORY = 2 << 20

Optimizer = Any


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))
        return result


class Model(nn.Module):
    def __init__(self, blocks: int = 6, *, checkpointing: str = "none") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self._checkpointing = checkpointing

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self._checkpointing == "none":
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self._checkpointing == "reentrant")
        result: torch.Tensor = self.head(hidden)
        return result


def batches(sizes: list[int] | None = None) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(size, 16, WIDTH) for size in sizes or [8, 8, 8, 8]]


def plain_step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: list[torch.Tensor] | None = None,
    step: Callable[[nn.Module, Optimizer, torch.Tensor], float] = plain_step,
) -> list[float]:
    return [step(model, optimizer, batch) for batch in data or batches()]


def made(build: Callable[[], nn.Module] = Model) -> Any:
    torch.manual_seed(1)
    return build()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_same(
    tmp_path: Path,
    build: Callable[[], nn.Module] = Model,
    *,
    data: list[torch.Tensor] | None = None,
    step: Callable[[nn.Module, Optimizer, torch.Tensor], float] = plain_step,
    memory: int = MEMORY,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    in_memory: dict[str, Any] | None = None,
    in_backward: bool = False,
    **settings: Any,
) -> None:
    """Compare a run with one in memory, bit for bit."""
    settings = {"lr": 1e-3, **settings}
    expected, kept = made(build), {"foreach": False} if in_memory is None else in_memory
    trained = [one for one in expected.parameters() if one.requires_grad]
    losses = train(expected, kind(trained, **settings, **kept), data, step)
    model, optimizer = deepnvme.offload(
        made(build), kind, memory=memory, swap_dir=tmp_path, in_backward=in_backward, **settings
    )
    assert train(model, optimizer, data, step) == losses
    stats = model.offloading.stats()
    assert stats.bytes_read > 0
    assert stats.resident_bytes_peak <= memory
    optimizer.close()
    for mine, theirs in zip(values(model), values(expected), strict=True):
        assert torch.equal(mine, theirs)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_results_are_those_in_memory(tmp_path: Path, kind: Any, settings: dict[str, Any]) -> None:
    check_same(tmp_path, kind=kind, **settings)


def test_steps_in_the_backward_pass(tmp_path: Path) -> None:
    check_same(tmp_path, in_backward=True)
    model, optimizer = deepnvme.offload(
        made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path, in_backward=True
    )
    train(model, optimizer)
    totals = {part.name: part.total_bytes for part in optimizer.plan.parts}
    assert totals["gradients"] == 0
    assert totals["state"] > 0
    model(batches()[0]).square().mean().backward()
    with pytest.raises(RuntimeError, match="accumulate"):
        model(batches()[0])
    optimizer.step()
    optimizer.close()
    with pytest.raises(UnsupportedError, match="max_norm"):
        deepnvme.offload(made(), torch.optim.AdamW, max_norm=1.0, memory=MEMORY, swap_dir=tmp_path, in_backward=True)


def test_an_optimizer_of_deepnvme(tmp_path: Path) -> None:
    check_same(tmp_path, kind=deepnvme.optim.Lion, in_memory={})


def test_bfloat16_weights_with_state_in_float32(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        return plain_step(model, optimizer, batch.bfloat16())

    check_same(tmp_path, lambda: Model().bfloat16(), step=step, memory=1 << 20, kind=deepnvme.optim.AdamW, in_memory={})


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_activation_checkpointing(tmp_path: Path, checkpointing: str, *, in_backward: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        return plain_step(model, optimizer, batch.clone().requires_grad_())

    check_same(tmp_path, lambda: Model(checkpointing=checkpointing), step=step, in_backward=in_backward)


def test_autocast(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    check_same(tmp_path, step=step)


def test_gradient_accumulation(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        total = 0.0
        for part in torch.split(batch, 4):
            loss = model(part).square().mean()
            loss.backward()
            total += float(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        return total

    check_same(tmp_path, step=step)


def test_a_scheduler(tmp_path: Path) -> None:
    schedulers: dict[int, Any] = {}

    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        scheduler = schedulers.setdefault(id(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        loss = plain_step(model, optimizer, batch)
        scheduler.step()
        return loss

    check_same(tmp_path, step=step)


@pytest.mark.parametrize("factor", [1.0, float("nan"), float("inf")])
def test_clipping_is_that_of_torch(tmp_path: Path, factor: float) -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        loss = model(batch).square().mean() * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    expected = made()
    train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False), step=step)
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    train(model, optimizer, step=step)
    optimizer.close()
    for mine, theirs in zip(values(model), values(expected), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-4, atol=1e-6)


def test_a_batch_that_changes_its_shape(tmp_path: Path) -> None:
    check_same(tmp_path, data=batches([8, 8, 2, 24, 24, 1, 8]))


def test_frozen_parameters(tmp_path: Path) -> None:
    def build() -> Model:
        model = Model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("down" in name)
        return model

    check_same(tmp_path, build, memory=1 << 20)


def test_tied_weights(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model: Any = Model()
        for block in model.blocks[1:]:
            block.up.weight = model.blocks[0].up.weight
        return model  # type: ignore[no-any-return]

    check_same(tmp_path, build, memory=1 << 20)


def test_param_groups(tmp_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [one for one in model.parameters() if one.dim() > 1]
        return [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [one for one in model.parameters() if one.dim() < 2]},
        ]

    expected, model = made(), made()
    losses = train(expected, torch.optim.AdamW(groups(expected), lr=1e-3, foreach=False))
    model, optimizer = deepnvme.offload(
        model, torch.optim.AdamW, params=groups(model), lr=1e-3, memory=MEMORY, swap_dir=tmp_path
    )
    assert train(model, optimizer) == losses
    optimizer.close()


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    expected = made()
    with torch.device("meta"):
        bare: Any = Model()
    model, optimizer = deepnvme.offload(bare, torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    model.offloading.load_state_dict(expected.state_dict())
    losses = train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False))
    assert train(model, optimizer) == losses
    optimizer.close()


def test_everything_that_fits_stays_in_memory(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory="64MB", swap_dir=tmp_path)
    train(model, optimizer)
    assert optimizer.plan.read_bytes == optimizer.plan.written_bytes == 0
    assert model.offloading.stats().bytes_read == 0
    optimizer.close()


def test_the_plan_is_what_a_step_does(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    estimate = optimizer.plan
    assert not estimate.is_measured
    assert estimate.read_bytes > 0
    assert "?" in str(estimate)
    train(model, optimizer)
    before = model.offloading.stats()
    train(model, optimizer)
    after, plan = model.offloading.stats(), optimizer.plan
    steps = len(batches())
    read, written = (after.bytes_read - before.bytes_read) / steps, (after.bytes_written - before.bytes_written) / steps
    # The plan knows neither gaps in memory, nor what is read or written ahead.
    assert 0.5 * read <= plan.read_bytes <= 1.1 * read
    assert 0.5 * written <= plan.written_bytes <= 1.1 * written
    totals = {part.name: part.total_bytes for part in plan.parts}
    assert [*totals] == ["parameters", "gradients", "state", "activations"]
    weights = sum(one.nbytes for one in made().parameters())
    assert totals["parameters"] <= weights
    assert totals["state"] == pytest.approx(2 * weights, rel=0.05)
    assert totals["gradients"] == pytest.approx(weights, rel=0.05)
    assert totals["activations"] > 0
    assert plan.compute_s is not None
    assert "expected" in str(plan)
    optimizer.close()


def test_the_plan_follows_the_batch(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    train(model, optimizer, batches([8, 8]))
    small = optimizer.plan.parts[-1].total_bytes
    train(model, optimizer, batches([32]))
    assert optimizer.plan.parts[-1].total_bytes == pytest.approx(4 * small, rel=0.1)
    optimizer.close()


def test_memory_stays_within_its_bound(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[Block(512) for _ in range(16)])

    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        return plain_step(model, optimizer, batch)

    torch.manual_seed(1)
    with torch.device("meta"):
        bare: Any = build()
    data = [torch.randn(64, 16, 512) for _ in range(3)]
    memory = 24 << 20
    model, optimizer = deepnvme.offload(bare, torch.optim.AdamW, lr=1e-3, memory=memory, swap_dir=tmp_path)
    train(model, optimizer, data[:1], step)
    before = memory_bytes("VmRSS")
    restart_peak()
    train(model, optimizer, data, step)
    # The bound was taken before. The rest is free memory, and what operations use at the moment: tensors of 2 and 4 MB.
    assert memory_bytes("VmHWM") - before < 88 << 20
    total = sum(part.total_bytes for part in optimizer.plan.parts)
    assert total > 6 * memory
    optimizer.close()


def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_head=4, n_embd=128, vocab_size=512, n_positions=64)
    torch.manual_seed(3)
    data = [torch.randint(0, 512, (8, 64)) for _ in range(3)]

    def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> float:
        torch.manual_seed(9)  # of the dropout
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    check_same(tmp_path, lambda: transformers.GPT2LMHeadModel(config), data=data, step=step, memory=4 << 20)


def test_torch_compile(tmp_path: Path) -> None:
    expected = made()
    losses = train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False))
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    assert train(torch.compile(model, backend="aot_eager"), optimizer) == losses  # type: ignore[arg-type]
    optimizer.close()
