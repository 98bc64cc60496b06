"""How a moment lies in memory: as fp32, as bf16, or as a byte for each element and a scale for each 128 of them.

What the short ones stand for, and why that is enough, says the kernel (`crates/deepnvme-optim/src/moment.rs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from deepnvme._deepnvme import Kernel

# Elements that share a scale; the kernel's blocks begin at multiples of it.
BLOCK = 128
# What a piece of state has in memory: numbers, or codes and scales.
StateData: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StateFormat:
    """A way for numbers to lie in memory.

    ``dtype`` is that of the elements; those of 8 bits have scales beside them.
    """

    name: str
    dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        """Whether it is codes and scales."""
        return self.dtype == torch.uint8

    def nbytes(self, count: int) -> int:
        """Bytes of so many elements; a multiple of four, so that what follows is aligned."""
        return self.scales_begin(count) + (-(-count // BLOCK) * 4 if self.has_scales else 0)

    def scales_begin(self, count: int) -> int:
        """Where the scales begin: behind the elements."""
        return -(-count * self.dtype.itemsize // 4) * 4

    def view(self, memory: torch.Tensor, count: int) -> StateData:
        """See ``nbytes(count)`` bytes as what they are."""
        elements = memory[: count * self.dtype.itemsize].view(self.dtype)
        if not self.has_scales:
            return elements
        return elements, memory[self.scales_begin(count) :].view(torch.float32)

    def make(self, count: int) -> StateData:
        """Make zeros."""
        return self.view(torch.zeros(self.nbytes(count), dtype=torch.uint8), count)


FP32 = StateFormat("fp32", torch.float32)
BF16 = StateFormat("bf16", torch.bfloat16)
EIGHT_BIT = StateFormat("8bit", torch.uint8)
FORMATS = {one.name: one for one in (FP32, BF16, EIGHT_BIT)}


@dataclass(frozen=True)
class StateKind:
    """A kind of state that elements of a parameter have."""

    name: str
    format: StateFormat = FP32
    # Of squares, which have no sign.
    squares: bool = False
    # What elements begin with.
    initial: float = 0.0


def encode(kept: StateData, values: torch.Tensor, kind: StateKind) -> None:
    """Make state of fp32 numbers: the nearest that it can stand for."""
    if isinstance(kept, torch.Tensor) and kept.dtype == torch.float32:
        kept.copy_(values)
    else:
        Kernel.pack(values.contiguous(), kept, kind.squares)


def decode(kept: StateData, out: torch.Tensor, kind: StateKind) -> None:
    """Give the fp32 numbers that state stands for. What was made of them stands for the same."""
    if isinstance(kept, torch.Tensor) and kept.dtype == torch.float32:
        out.copy_(kept)
    else:
        Kernel.unpack(kept, out, kind.squares)
