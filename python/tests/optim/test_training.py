"""A small language model trained on this project's documentation: 16-bit and 8-bit state trains as well as fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme._deepnvme import Kernel

_ROOT = Path(__file__).resolve().parents[3]
_CONTEXT, _BATCH, _STEPS = 32, 16, 150


def _text() -> torch.Tensor:
    text = b"".join(path.read_bytes() for path in sorted((_ROOT / "docs").rglob("*.md")))
    assert len(text) > 50_000
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Model(nn.Module):
    """A byte-level language model: an embedding, a causal convolution, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.mix = nn.Conv1d(32, 96, 5)
        self.hidden = nn.Linear(96, 96)
        self.head = nn.Linear(96, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte after each."""
        embedded = nn.functional.pad(self.embedding(tokens).transpose(1, 2), (4, 0))
        mixed = torch.relu(self.mix(embedded).transpose(1, 2))
        out: torch.Tensor = self.head(mixed + torch.relu(self.hidden(mixed)))
        return out


def _state(kind: str, elements: int) -> Any:
    if kind == "q8":
        return torch.zeros(elements, dtype=torch.uint8), torch.zeros(-(-elements // 128))
    return torch.zeros(elements, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)


def _train(kind: str) -> list[float]:
    text = _text()
    torch.manual_seed(0)
    model, kernel = Model(), Kernel(threads=1)
    params = [param.detach().view(-1) for param in model.parameters()]
    moments = [[_state(kind, param.numel()) for _ in range(2)] for param in params]
    begins = [sum(param.numel() for param in params[:index]) for index in range(len(params))]
    losses = []
    for step in range(1, _STEPS + 1):
        places = torch.randint(len(text) - _CONTEXT - 1, (_BATCH,))
        window = torch.stack([text[place : place + _CONTEXT + 1] for place in places.tolist()])
        loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [param.grad.view(-1) for param in model.parameters() if param.grad is not None]
        parts = list(zip(params, grads, moments, [None] * len(params), begins, strict=True))
        kernel.step("adamw", {"lr": 5e-3}, parts, step=step, seed=1)
        losses.append(loss.item())
    return losses


def test_short_state_trains_as_well() -> None:
    torch.set_num_threads(1)
    tail = {kind: sum(_train(kind)[-25:]) / 25 for kind in ("f32", "bf16", "q8")}
    # A random byte has 5.5 nats; this model has learnt most of what it can.
    assert tail["f32"] < 3.0
    assert tail["bf16"] == pytest.approx(tail["f32"], rel=0.03)
    assert tail["q8"] == pytest.approx(tail["f32"], rel=0.03)
