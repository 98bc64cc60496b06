"""Notice changes of memory that torch does not count."""

from __future__ import annotations

import torch

# Words of 8 bytes that are summed at a time.
_FINGERPRINT_ELEMENTS = 1 << 17


def fingerprint(memory: torch.Tensor) -> tuple[int, int]:
    """Return two sums over memory, of which the second depends on places: to notice changes, not attacks."""
    whole = memory.numel() // 8 * 8
    words, rest = memory[:whole].view(torch.int64), memory[whole:].to(torch.int64)
    places = torch.arange(1, min(len(words), _FINGERPRINT_ELEMENTS) + 1)
    total = placed = 0
    for number, part in enumerate((*torch.split(words, _FINGERPRINT_ELEMENTS), rest)):
        total += int(part.sum())
        placed += (number + 1) * int((part * places[: len(part)]).sum() if len(part) <= len(places) else part.sum())
    return total, placed
