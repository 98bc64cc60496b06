"""A byte-level transformer, and its training on this project's licence."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, DEPTH, CONTEXT = 128, 64, 4, 2, 16
BATCH, MICRO_BATCHES = 8, 2
WARMUP, PEAK_RATE = 20, 4e-3


class Block(nn.Module):
    """Attention and two layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before_layers = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        heads = self.mix(self.before_attention(hidden)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(found.transpose(1, 2).reshape(batch, length, WIDTH))
        answer: torch.Tensor = hidden + self.down(functional.gelu(self.up(self.before_layers(hidden))))
        return answer


class Model(nn.Module):
    """The head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(20)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for weight in (self.embed.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        answer: torch.Tensor = self.head(self.norm(hidden))
        return answer


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
