"""Load the weights that stay in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepnvme._deepnvme import _Streamer
from deepnvme._modules.weight_classes import BoundParameter
from deepnvme._stream.memory_budget import PAGE_BYTES
from deepnvme._stream.parameter_binding import get_weight, set_weight, view_weight
from deepnvme._stream.weight_origin import CACHE_LINE_BYTES, conversions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deepnvme._modules.partition import Weight
    from deepnvme._stream.original_weights import ChangedBuffers
    from deepnvme._stream.weight_origin import Origin, WeightFiles


def place_resident(weights: Sequence[Weight], origin_of: Mapping[str, Origin]) -> tuple[dict[Origin, int], int]:
    """Assign an offset to each weight, at its required position within a cache line.

    Returns:
        The offset of each, and the bytes of all.
    """
    places: dict[Origin, int] = {}
    at = 0
    for weight in weights:
        origin = origin_of[weight.name]
        if origin not in places:
            places[origin] = at + origin.line_offset
            at += -(-(origin.line_offset + origin.memory_nbytes) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return places, at


def load_resident(weights: Sequence[Weight], files: WeightFiles, device: torch.device, changed: ChangedBuffers) -> None:
    """Read weights once and bind them to their modules; `changed` learns what these had before."""
    if not weights:
        return
    places, nbytes = place_resident(weights, files.origin_of)
    memory = torch.empty(max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES, dtype=torch.uint8, device=device)
    reads, converted = [], []
    for origin, place in places.items():
        if not origin.is_raw:
            converted += conversions(origin, place)
            continue
        start = place
        for byte_range in origin.ranges:
            reads.append((byte_range.source, byte_range.offset, byte_range.nbytes, start))
            start += byte_range.nbytes
    # All of them are one group that is loaded once.
    streamer = _Streamer(
        files=list(files.sources),
        groups=[(0, reads)],
        classes=[(1, 0, memory.nbytes, False)],  # slots, prefetch limit, bytes of a slot, whether slots share memory
        arena=memory,
        engine=files.engine,
        conversions=[converted],
    )
    streamer.acquire(0)
    streamer.close()
    known: dict[int, torch.Tensor] = {}
    for weight in weights:
        # A parameter that two modules share stays shared.
        original = get_weight(weight)
        if id(original) not in known:
            origin = files.origin_of[weight.name]
            known[id(original)] = view_weight(memory, places[origin], origin, original, BoundParameter)
            changed.watch(original, known[id(original)])
        set_weight(weight, known[id(original)])
