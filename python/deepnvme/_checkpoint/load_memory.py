"""The memory that a load fills: private and aligned buffers that mirror byte ranges of a file.

No page is touched before the load, unless it is pinned. A pool of buffers reuses the memory once no tensor does. Fresh
memory costs more than reading into it: the kernel fills it with zeros, and the host of a virtual machine may have to
allocate it first.
"""

from __future__ import annotations

import errno
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from deepnvme._utils.devices import engine_reaches, relaxed_capture
from deepnvme._utils.end_watch import EndWatch
from deepnvme._utils.gc_pause import gc_paused
from deepnvme._utils.tensors import pinned_empty
from deepnvme.errors import OutOfMemoryError

if TYPE_CHECKING:
    from deepnvme._deepnvme import _CheckpointReader, _Loading

    _LoadBuffer = tuple[int, int, list[tuple[int, int]]]

PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20
# From this size on, rounding up to huge pages wastes little.
_HUGE_BYTES_MIN = 8 << 20


class LoadBuffers:
    """The memory of some storages of a file, and the load that fills it.

    For a GPU that the engine reaches, it is memory of that GPU. For any other device it is host memory, of
    ``pool_buffer`` if that is given.
    """

    @gc_paused
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
            _, nbytes, storages = buffer
            memory: Any
            start = 0
            if self._is_on_gpu:
                memory = allocate_on_gpu(nbytes, device)
                targets.append((buffer, memory))
            else:
                memory, start = (
                    pool_buffer.allocate_part(nbytes) if pool_buffer else allocate(nbytes, pin_memory=pin_memory)
                )
                targets.append((buffer, memoryview(memory)[start : start + nbytes]))
            for storage_index, at in storages:
                self._locations[storage_index] = (memory, start + at)
        self._loading: _Loading = reader.start(targets)
        # While the bytes are read. A lazy state asks for one storage at a time: asking for all would be quadratic.
        self._sizes = dict(zip(wanted, reader.storage_nbytes(wanted), strict=True))

    def flat(self, storage_index: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return one storage as a one-dimensional tensor. Its bytes are there once ``finish`` has returned."""
        if storage_index not in self._locations:
            # Empty storages are in no buffer. Each gets a storage of its own, which may be resized.
            return allocate_on_gpu(0, self._device).view(dtype) if self._is_on_gpu else torch.empty(0, dtype=dtype)
        buffer, at = self._locations[storage_index]
        if self._is_on_gpu:
            part: torch.Tensor = buffer[at : at + self._sizes[storage_index] // dtype.itemsize * dtype.itemsize].view(
                dtype
            )
            return part
        return torch.frombuffer(buffer, dtype=dtype, count=self._sizes[storage_index] // dtype.itemsize, offset=at)

    def storage(self, storage_index: int, device: torch.device) -> torch.UntypedStorage:
        """Return one storage, copied to ``device`` if the engine does not reach it."""
        flat = self.flat(storage_index)
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


@dataclass(frozen=True)
class _Allocation:
    nbytes: int
    buffer: Any
    start: int


@dataclass
class PoolBuffer:
    """A buffer of the pool. It is in use while this object or a tensor in it exists."""

    nbytes: int
    view: memoryview
    start: int
    used_bytes: int = 0

    def allocate_part(self, nbytes: int) -> tuple[Any, int]:
        """Return a page-aligned part, like ``allocate``; fresh memory if the buffer is used up."""
        begin = self.used_bytes
        if begin + nbytes > self.nbytes:
            return allocate(nbytes)
        self.used_bytes = begin + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        return self.view, self.start + begin


@dataclass
class BufferPool:
    """Buffers that are handed out again and again.

    Idle buffers and those that are acquired take at most ``bytes_max``. A released buffer that tensors still use is not
    counted. Tensors may be freed in any thread; everything else is for one thread.
    """

    bytes_max: int
    acquired_bytes: int = 0
    _idle: list[_Allocation] = field(default_factory=list)
    # The views of acquired buffers, each with its buffer.
    _in_use: EndWatch[_Allocation] = field(default_factory=EndWatch)

    def can_acquire(self, nbytes: int) -> bool:
        """Whether another buffer fits into the limit."""
        return self.acquired_bytes + nbytes <= self.bytes_max

    def has_idle(self, nbytes: int) -> bool:
        """Whether an idle buffer of this size is available."""
        self._reclaim()
        return any(memory.nbytes == nbytes for memory in self._idle)

    def acquire(self, nbytes: int) -> PoolBuffer:
        """Hand out a buffer, an idle one if there is one of this size. It counts until ``release``."""
        self._reclaim()
        self.acquired_bytes += nbytes
        memory = next((memory for memory in self._idle if memory.nbytes == nbytes), None)
        if memory is not None:
            self._idle.remove(memory)
        self._evict()
        if memory is None:
            memory = _Allocation(nbytes, *allocate(nbytes))
        # A view for each acquisition: tensors refer to it, so it ends with the last of them.
        view = memoryview(memory.buffer)
        self._in_use.watch(view, memory)
        return PoolBuffer(nbytes, view, memory.start)

    def release(self, nbytes: int) -> None:
        """Release a buffer. It becomes idle once no tensor uses it."""
        self.acquired_bytes -= nbytes

    def _reclaim(self) -> None:
        self._idle.extend(self._in_use.ended())
        self._evict()

    def _evict(self) -> None:
        # The oldest first: requested sizes change slowly.
        while self._idle and self.acquired_bytes + sum(memory.nbytes for memory in self._idle) > self.bytes_max:
            del self._idle[0]


def allocate(nbytes: int, *, pin_memory: bool = False) -> tuple[Any, int]:
    """Allocate private memory. Returns it, and the page-aligned offset of the ``nbytes``.

    Memory that is not pinned is not touched. In large allocations of it, the offset is aligned to a huge page. The load
    decides whether to use huge pages.
    """
    if pin_memory:
        return pinned_empty(nbytes).numpy(), 0
    if nbytes < _HUGE_BYTES_MIN:
        return _mapped(nbytes), 0
    # The part before the first huge page is never touched, so it takes no memory.
    memory = _mapped((-(-nbytes // _HUGE_BYTES) + 1) * _HUGE_BYTES)
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return memory, -address % _HUGE_BYTES


def _mapped(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise OutOfMemoryError(f"there is not enough memory for {nbytes} bytes of tensors") from error


def allocate_on_gpu(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate GPU memory without touching it."""
    with relaxed_capture():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
