"""Memory that a load fills: stretches that mirror stretches of a file."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepnvme._deepnvme import _CheckpointReader, _Loading

    _Arena = tuple[int, int, list[tuple[int, int]]]


def allocate(nbytes: int) -> mmap.mmap:
    """Make private, page-aligned, untouched memory: what it is filled with is the first thing written to it."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Arenas:
    """The memory of some of a file's storages, and the load that fills it."""

    def __init__(self, reader: _CheckpointReader, wanted: list[int]) -> None:
        self._reader = reader
        self._places: dict[int, tuple[mmap.mmap, int]] = {}
        buffers: list[tuple[_Arena, mmap.mmap]] = []
        for arena in reader.arenas(wanted):
            buffer = allocate(arena[1])
            buffers.append((arena, buffer))
            for extent, at in arena[2]:
                self._places[extent] = (buffer, at)
        self._loading: _Loading = reader.start(buffers)
        # Asked for while the bytes are on their way.
        self._sizes = [storage[1] for storage in reader.storages()]

    def flat(self, extent: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Alias one storage as a tensor of one dimension; its bytes are there when ``finish`` has returned."""
        if extent not in self._places:
            return torch.empty(0, dtype=dtype)
        buffer, at = self._places[extent]
        return torch.frombuffer(buffer, dtype=dtype, count=self._sizes[extent] // dtype.itemsize, offset=at)

    def finish(self, verify: str, progress: object) -> None:
        """Wait until all bytes are there, and compare them with their checksums."""
        self._loading.finish(verify, progress)
