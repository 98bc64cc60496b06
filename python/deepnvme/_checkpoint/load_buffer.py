"""The memory that a load fills: buffers that mirror byte ranges of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from deepnvme._checkpoint.allocation import allocate, allocate_on_gpu
from deepnvme._utils.tensors import engine_reaches

if TYPE_CHECKING:
    from deepnvme._checkpoint.buffer_pool import PoolBuffer
    from deepnvme._deepnvme import _CheckpointReader, _Loading

    _LoadBuffer = tuple[int, int, list[tuple[int, int]]]


class LoadBuffers:
    """The memory of some storages of a file, and the load that fills it.

    For a GPU that the engine reaches, it is memory of that GPU. For any other device it is host memory, of
    ``pool_buffer`` if that is given.
    """

    def __init__(
        self,
        reader: _CheckpointReader,
        wanted: list[int],
        device: torch.device,
        *,
        pin_memory: bool = False,
        pool_buffer: PoolBuffer | None = None,
    ) -> None:
        self._reader = reader
        self._locations: dict[int, tuple[Any, int]] = {}
        self._is_on_gpu = device.type != "cpu" and engine_reaches(device)
        self._device = device
        targets: list[tuple[_LoadBuffer, Any]] = []
        for buffer in reader.load_buffers(wanted):
            memory: Any
            start = 0
            if self._is_on_gpu:
                memory = allocate_on_gpu(buffer[1], device)
                targets.append((buffer, memory))
            else:
                memory, start = (
                    pool_buffer.allocate_part(buffer[1]) if pool_buffer else allocate(buffer[1], pin_memory=pin_memory)
                )
                targets.append((buffer, memoryview(memory)[start : start + buffer[1]]))
            for extent, at in buffer[2]:
                self._locations[extent] = (memory, start + at)
        self._loading: _Loading = reader.start(targets)
        # While the bytes are read. A lazy state asks for one storage at a time: asking for all would be quadratic.
        self._sizes = dict(zip(wanted, reader.storage_nbytes(wanted), strict=True))

    def flat(self, extent: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return one storage as a one-dimensional tensor. Its bytes are there once ``finish`` has returned."""
        if extent not in self._locations:
            # Empty storages are in no buffer. Each gets a storage of its own, which may be resized.
            return allocate_on_gpu(0, self._device).view(dtype) if self._is_on_gpu else torch.empty(0, dtype=dtype)
        buffer, at = self._locations[extent]
        if self._is_on_gpu:
            part: torch.Tensor = buffer[at : at + self._sizes[extent] // dtype.itemsize * dtype.itemsize].view(dtype)
            return part
        return torch.frombuffer(buffer, dtype=dtype, count=self._sizes[extent] // dtype.itemsize, offset=at)

    def storage(self, extent: int, device: torch.device) -> torch.UntypedStorage:
        """Return one storage, copied to ``device`` if the engine does not reach it."""
        flat = self.flat(extent)
        if self._is_on_gpu:
            # Through DLPack, since a slice of a tensor shares the storage of the whole.
            return torch.utils.dlpack.from_dlpack(flat).untyped_storage()
        return (flat if device.type == "cpu" else flat.to(device)).untyped_storage()

    @property
    def is_done(self) -> bool:
        """Whether no read is in flight. ``finish`` raises the error of a read."""
        return self._loading.is_done()

    def finish(self, verify: str, progress: object) -> None:
        """Wait for all bytes, and compare them with their checksums."""
        self._loading.finish(verify, progress)
