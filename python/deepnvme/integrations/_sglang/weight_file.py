"""The private file of streamed weights, without a name, with one extent for each module."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import start_write
from deepnvme._utils import memory_order

if TYPE_CHECKING:
    from collections.abc import Sequence

# Extents begin at a page, so that they can be mapped, and read directly on any disk.
_EXTENT_ALIGNMENT = max(4096, mmap.PAGESIZE)
# Alignment of tensors, as GPU kernels expect it.
_TENSOR_ALIGNMENT = 512


@dataclass(frozen=True)
class TensorLayout:
    """Offset and layout of a tensor in its extent."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, extent: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the extent's bytes."""
        flat = extent[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains each of its bytes once without gaps, in any order of dimensions."""
    is_plain = tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_quantized
    return is_plain and memory_order.is_dense(tensor)


def plan_layout(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorLayout], int]:
    """Return the layout of dense tensors, one after the other, and the total bytes."""
    layouts: list[TensorLayout] = []
    at = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        layouts.append(TensorLayout(at, nbytes, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())))
        at = _ceil(at + nbytes, _TENSOR_ALIGNMENT)
    return layouts, at


class WeightFile:
    """A file without a name in a folder. It vanishes with the process, however that ends.

    Args:
        folder: a folder on the disk to stream from.

    Raises:
        OSError: the folder is not writable or is full; the message names it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with tempfile.TemporaryFile(dir=folder, prefix=".deepnvme-weights-") as file:
            self._descriptor = os.dup(file.fileno())
        self.nbytes = 0

    @property
    def path(self) -> str:
        """A path by which this process can open the file again."""
        return f"/proc/self/fd/{self._descriptor}"

    def reserve(self, nbytes: int) -> int:
        """Add an extent with allocated disk space. Returns its offset."""
        start = self.nbytes
        stop = start + _ceil(max(1, nbytes), _EXTENT_ALIGNMENT)
        there = os.fstatvfs(self._descriptor)
        # Checked first: some file systems fill up for everyone before they report the lack of space.
        if stop - start > there.f_bavail * there.f_frsize:
            raise self._full_disk_error(stop)
        try:
            os.posix_fallocate(self._descriptor, start, stop - start)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                os.ftruncate(self._descriptor, start)
                raise self._full_disk_error(stop) from error
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._descriptor, stop)
        self.nbytes = stop
        return start

    def mapped(self, start: int, nbytes: int) -> torch.Tensor:
        """Map an extent as bytes. Writes to it go to the file, through the page cache."""
        memory = mmap.mmap(self._descriptor, max(1, nbytes), mmap.MAP_SHARED, offset=start)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def write(self, tensor: torch.Tensor, offset: int) -> Any:
        """Start to write bytes at an offset."""
        return start_write(tensor, self.path, offset)

    def sync(self) -> None:
        """Sync the file, and drop it from the page cache."""
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _full_disk_error(self, nbytes: int) -> OSError:
        msg = f"there is no space for {nbytes} bytes of weights; free some, or use another folder"
        return OSError(errno.ENOSPC, msg, self.folder)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        # Taken first: a second close would close another file that got the number.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _ceil(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
