"""Layers of a file that pass through bounded memory. Each is read while earlier ones compute.

``_Streamer`` schedules the reads, as for :func:`deepnvme.stream`. This module gives their bytes as tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepnvme._deepnvme import _Streamer
from deepnvme._stream.memory_budget import PAGE_BYTES, allocate_slots, classify_sizes, merge_small_classes
from deepnvme._utils.tensors import pinned_empty
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    _Piece = tuple[str, int, int]


class Slot:
    """Memory that contains a unit until the unit is released."""

    def __init__(self, memory: torch.Tensor, places: list[tuple[int, int]]) -> None:
        self._memory, self._places = memory, places

    def tensor(self, index: int) -> torch.Tensor:
        """Return the bytes of one piece of the unit, as a one-dimensional ``uint8`` tensor."""
        at, nbytes = self._places[index]
        return self._memory[at : at + nbytes]


class LayerStreamer:
    """Keeps some of the units in memory, and reads the next ones ahead.

    Args:
        units: the pieces of each unit (path, offset, bytes), in order of use.
        memory: bytes for units in memory, without the rounding to whole pages.
        prefetch_layers: units to read ahead. Default: 2, if the memory allows it.
        device: device of the memory. Default: the host, pinned up to its limits.

    Raises:
        ValueError: the largest unit does not fit into the memory.
        OSError: a file cannot be opened.
    """

    def __init__(
        self,
        units: Sequence[Sequence[_Piece]],
        *,
        memory: int,
        prefetch_layers: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        paths = list(dict.fromkeys(path for pieces in units for path, _, _ in pieces))
        self._places: list[list[tuple[int, int]]] = []
        reads = []
        for pieces in units:
            at, places, unit = 0, [], []
            for path, offset, nbytes in pieces:
                # With the same offset within a page as in the file, direct I/O needs no copy.
                at = -(-at // PAGE_BYTES) * PAGE_BYTES + offset % PAGE_BYTES
                places.append((at, nbytes))
                unit.append((paths.index(path), offset, nbytes, at))
                at += nbytes
            self._places.append(places)
            reads.append(unit)
        sizes = [sum(nbytes for _, nbytes in places) for places in self._places]
        ends = [places[-1][0] + places[-1][1] if places else 0 for places in self._places]
        largest = max(sizes, default=0)
        if memory < largest:
            raise InvalidArgumentError(
                f"memory is {memory} bytes, but the largest unit takes {largest}; set it to at least {largest}, or "
                f"{2 * largest} to read ahead"
            )
        # Room for the requested number of units, each rounded to whole pages.
        memory += max((end - size for end, size in zip(ends, sizes, strict=True)), default=0) * (
            memory // max(largest, 1)
        )
        memory += PAGE_BYTES * (memory // max(largest, 1))
        class_of, slot_bytes = merge_small_classes(memory, *classify_sizes(ends))
        classes = allocate_slots(memory, class_of, slot_bytes, prefetch_layers) if ends else []
        self._slots = sum(each.slots for each in classes)
        self._device = device if device is not None and device.type == "cuda" else None
        nbytes = sum(each.slots * each.slot_bytes for each in classes)
        self._memory = (
            pinned_empty(nbytes) if self._device is None else torch.empty(nbytes, dtype=torch.uint8, device=device)
        )
        kinds = [(each.slots, each.prefetch, each.slot_bytes, each.shares_memory) for each in classes]
        self._streamer = _Streamer(paths, list(zip(class_of, reads, strict=True)), kinds, self._memory, None)
        self._streamer.warm_up()

    def acquire(self, unit: int) -> Slot:
        """Wait until the unit is in memory, and keep it there until it is released."""
        at = self._streamer.acquire(unit)
        return Slot(self._memory, [(at + place, nbytes) for place, nbytes in self._places[unit]])

    def release(self, unit: int) -> None:
        """Release the unit's memory once the current stream's work on it is done, and continue to read ahead."""
        stream = None if self._device is None else torch.cuda.current_stream(self._device)
        if not self._streamer.release(unit, stream):
            raise InvalidArgumentError(f"unit {unit} was released without being acquired")

    def close(self) -> None:
        """Stop reading. A second call does nothing."""
        self._streamer.close()

    def stats(self) -> dict[str, float]:
        """Return counts of reads and waits since the start."""
        return {"units": len(self._places), "slots": self._slots, **self._streamer.stats()}
