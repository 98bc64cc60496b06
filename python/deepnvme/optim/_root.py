"""Which square root this torch takes on this processor."""

from __future__ import annotations

import torch

from deepnvme._deepnvme import Kernel

_VALUES = 1 << 14


_found: list[str] = []


def root() -> str:
    """Name the kernel's root that has the bits of `torch.sqrt`; the exact one where none has."""
    if not _found:
        _found.append(_find())
    return _found[0]


def _find() -> str:
    # Every exponent, and mantissas that lie as evenly as can be.
    places = torch.arange(_VALUES, dtype=torch.int64)
    bits = (places * 0x7F80_0000 // _VALUES) ^ (places * 0x9E37_79B1 & 0x7F_FFFF)
    values = bits.clamp(0, 0x7F7F_FFFF).to(torch.int32).view(torch.float32)
    expected = values.sqrt()
    for name in Kernel.roots():
        taken = values.clone()
        Kernel(threads=1, root=name).take_roots(taken)
        if torch.equal(taken, expected):
            return name
    return "exact"
