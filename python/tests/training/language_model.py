"""A byte-level transformer, and its training on this project's licence."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from small_transformer import Transformer

VOCABULARY, WIDTH, HEADS, DEPTH, CONTEXT = 128, 64, 4, 2, 16
BATCH, MICRO_BATCHES = 8, 2
WARMUP, PEAK_RATE = 20, 4e-3


class Model(Transformer):
    """The head is tied to the embedding."""

    def __init__(self) -> None:
        torch.manual_seed(20)
        super().__init__(VOCABULARY, CONTEXT, WIDTH, HEADS, DEPTH)
        self.head.weight = self.embed.weight
        for weight in (self.embed.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)


@functools.cache
def text() -> torch.Tensor:
    """Return its bytes, with those beyond ASCII mapped to one."""
    found = (Path(__file__).parents[3] / "LICENSE").read_bytes()
    assert len(found) > 5_000
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)


def batch(step: int, micro: int) -> torch.Tensor:
    """Return the same windows for the same step, also after a restart."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    places = torch.randint(len(text()) - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([text()[place : place + CONTEXT + 1] for place in places.tolist()])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split parameters for weight decay: none for norms and biases."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]


def adamw(kind: Any, model: nn.Module, **options: Any) -> Any:
    """Create an optimizer with both groups."""
    return kind(groups(model), lr=PEAK_RATE, betas=(0.9, 0.98), **options)


class Training:
    """Steps of two micro-batches with clipping and a schedule that rises and falls."""

    def __init__(self, model: nn.Module, optimizer: Any, steps: int) -> None:
        def rate(step: int) -> float:
            if step < WARMUP:
                return (step + 1) / WARMUP
            return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1)))

        self.model, self.optimizer = model, optimizer
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(self, number: int) -> float:
        """Make one step. Return the mean loss before it."""
        self.optimizer.zero_grad()
        total = 0.0
        for micro in range(MICRO_BATCHES):
            tokens = batch(number, micro)
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return total
