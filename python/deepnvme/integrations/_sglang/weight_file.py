"""The file behind weights that stream: private, without a name, a stretch for each module."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import start_write

if TYPE_CHECKING:
    from collections.abc import Sequence

# Where a stretch begins: a page, so that it can be mapped, and read directly on any disk.
_EXTENT_ALIGNMENT = max(4096, mmap.PAGESIZE)
# Where a tensor begins: what kernels of GPUs take for granted of memory of their own.
_TENSOR_ALIGNMENT = 512


@dataclass(frozen=True)
class TensorLayout:
    """Where a tensor is in its stretch, and how it lies there."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, stretch: torch.Tensor) -> torch.Tensor:
        """Make the tensor out of the stretch's bytes."""
        flat = stretch[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has each of its bytes once and no gaps between them, in whatever order of dimensions."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_quantized:
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def plan_layout(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorLayout], int]:
    """Say where each of some dense tensors goes, one after the other, and how many bytes that takes."""
    layouts: list[TensorLayout] = []
    at = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        layouts.append(TensorLayout(at, nbytes, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())))
        at = _ceil(at + nbytes, _TENSOR_ALIGNMENT)
    return layouts, at


class WeightFile:
    """A file without a name in a folder: it is gone with the process, however that ends.

    Args:
        folder: where; on the disk that is to be streamed from.

    Raises:
        OSError: the folder cannot be written to, or has no room; the message names it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with tempfile.TemporaryFile(dir=folder, prefix=".deepnvme-weights-") as file:
            self._descriptor = os.dup(file.fileno())
        self.nbytes = 0

    @property
    def path(self) -> str:
        """A name by which this process can open the file again."""
        return f"/proc/self/fd/{self._descriptor}"

    def reserve(self, nbytes: int) -> int:
        """Add a stretch of so many bytes, with room for it on the disk; where it begins."""
        start = self.nbytes
        stop = start + _ceil(max(1, nbytes), _EXTENT_ALIGNMENT)
        there = os.fstatvfs(self._descriptor)
        # Asked first: a file system that finds out on the way has filled up for everybody by then.
        if stop - start > there.f_bavail * there.f_frsize:
            raise self._no_room(stop)
        try:
            os.posix_fallocate(self._descriptor, start, stop - start)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                os.ftruncate(self._descriptor, start)
                raise self._no_room(stop) from error
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._descriptor, stop)
        self.nbytes = stop
        return start

    def mapped(self, start: int, nbytes: int) -> torch.Tensor:
        """Map a stretch as bytes: what is written there gets into the file, and takes no memory that must stay."""
        memory = mmap.mmap(self._descriptor, max(1, nbytes), mmap.MAP_SHARED, offset=start)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def write(self, tensor: torch.Tensor, offset: int) -> Any:
        """Start to write bytes somewhere in a stretch."""
        return start_write(tensor, self.path, offset)

    def sync(self) -> None:
        """Have everything on the disk, and none of it in the page cache any longer."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _no_room(self, nbytes: int) -> OSError:
        msg = f"no room for {nbytes} bytes of weights; free some, or name another folder"
        return OSError(errno.ENOSPC, msg, self.folder)

    def close(self) -> None:
        """Let go of the file. A second call changes empty."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _ceil(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
