"""A plain module with its weights in a file and its expected output, for tests without transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import deepnvme

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, DEPTH, ROWS = 128, 8, 90
# Enough for two of the layers, and for some rows.
MEMORY = 200_000


class Plain(nn.Module):
    """An embedding, layers, and a head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale + self.shift
        logits: torch.Tensor = self.head(hidden)
        return logits


@dataclass
class Saved:
    """A module on disk, with its expected output."""

    path: Any
    question: torch.Tensor
    answer: torch.Tensor

    def stream(self, memory: int = MEMORY, **options: Any) -> Any:
        """Stream the module, created without weights."""
        with torch.device("meta"):
            module = Plain().eval()
        return deepnvme.stream(module, weights=self.path, memory=memory, **options)


def save(path: Path | deepnvme.StripeSet, seed: int = 0) -> Saved:
    """Create a module, and save its weights to a file."""
    torch.manual_seed(seed)
    module = Plain().eval()
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "head.weight"}
    deepnvme.save(state, path)
    question = torch.randint(0, ROWS, (3, 17))
    with torch.no_grad():
        return Saved(path, question, module(question))
