"""Memory formats of a moment: fp32, bf16, or 8-bit codes with a scale per 128 elements.

`crates/deepnvme-optim/src/moment.rs` defines the values of the short formats, and why they suffice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from deepnvme._deepnvme import Kernel

# Elements that share a scale. The kernel's blocks begin at multiples of it.
BLOCK = 128
# State in memory: numbers, or codes and scales.
StateData: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StateFormat:
    """A memory format for numbers.

    ``dtype`` is the element type. 8-bit elements have scales in addition.
    """

    name: str
    dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        """Whether it consists of codes and scales."""
        return self.dtype == torch.uint8

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` elements, a multiple of four, so that the next state is aligned."""
        return self.scales_begin(count) + (-(-count // BLOCK) * 4 if self.has_scales else 0)

    def scales_begin(self, count: int) -> int:
        """Offset of the scales, which follow the elements."""
        return -(-count * self.dtype.itemsize // 4) * 4

    def view(self, memory: torch.Tensor, count: int) -> StateData:
        """View ``nbytes(count)`` bytes as state."""
        elements = memory[: count * self.dtype.itemsize].view(self.dtype)
        if not self.has_scales:
            return elements
        return elements, memory[self.scales_begin(count) :].view(torch.float32)

    def make(self, count: int) -> StateData:
        """Allocate state of zeros."""
        return self.view(torch.zeros(self.nbytes(count), dtype=torch.uint8), count)


FP32 = StateFormat("fp32", torch.float32)
BF16 = StateFormat("bf16", torch.bfloat16)
EIGHT_BIT = StateFormat("8bit", torch.uint8)
FORMATS = {one.name: one for one in (FP32, BF16, EIGHT_BIT)}


@dataclass(frozen=True)
class StateKind:
    """A kind of state: its name, format and initial value."""

    name: str
    format: StateFormat = FP32
    # Squares, which have no sign.
    squares: bool = False
    # Initial value of the elements.
    initial: float = 0.0


def part_of(kept: StateData, begin: int, end: int) -> StateData:
    """View some elements of state. ``begin`` is a multiple of ``BLOCK``."""
    if isinstance(kept, torch.Tensor):
        return kept[begin:end]
    codes, scales = kept
    return codes[begin:end], scales[begin // BLOCK : -(-end // BLOCK)]


def encode(kept: StateData, values: torch.Tensor, kind: StateKind) -> None:
    """Encode fp32 numbers as the nearest values of the format."""
    if isinstance(kept, torch.Tensor) and kept.dtype == torch.float32:
        kept.copy_(values)
    else:
        Kernel.pack(values.contiguous(), kept, kind.squares)


def decode(kept: StateData, out: torch.Tensor, kind: StateKind) -> None:
    """Decode state to fp32. Encoding the result again is lossless."""
    if isinstance(kept, torch.Tensor) and kept.dtype == torch.float32:
        out.copy_(kept)
    else:
        Kernel.unpack(kept, out, kind.squares)
