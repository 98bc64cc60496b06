"""The place in a file of a tensor that is mapped into memory.

Model servers hand tensors to a model, not their files. But safetensors maps its files: a tensor of it is a view of a
file, and the kernel knows which one. So nothing depends on the names of tensors, which models change while they load.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


class FilePlace(NamedTuple):
    """Contiguous bytes of a file."""

    path: str
    offset: int
    identity: tuple[int, int]
    """Device and inode of the file."""


def find_file(tensor: torch.Tensor, name: str) -> FilePlace:
    """Return the file of which a tensor's memory is a mapping, and the offset there.

    Args:
        tensor: a tensor of a checkpoint, or a part of one.
        name: name of the table, for messages.

    Raises:
        UnsupportedError: the tensor's memory is no mapping of a file, or the bytes are not those of the file.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        msg = f"{name}: a part of it was handed over on {tensor.device}, or not contiguous; {_LOAD_FORMATS}"
        raise UnsupportedError(msg)
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    place = _lookup(address, nbytes)
    if place is None:
        msg = f"{name}: its tensors are no views of a mapped file; {_LOAD_FORMATS}"
        raise UnsupportedError(msg)
    _check_identity(place, name)
    _check_bytes(tensor, place, name)
    return place


_LOAD_FORMATS = (
    "a table stays on disk only if its safetensors file is mapped: use --load-format deepnvme, or safetensors "
    "with the default load strategy"
)


def _lookup(address: int, nbytes: int) -> FilePlace | None:
    with open("/proc/self/maps", "rb") as maps:  # noqa: PTH123 (a file of the kernel)
        for line in maps:
            # Start and end, permissions, offset, device, inode, path.
            fields = line.rstrip(b"\n").split(None, 5)
            start, end = (int(part, 16) for part in fields[0].split(b"-"))
            if not start <= address < end:
                continue
            inode = int(fields[4])
            if inode == 0 or address + nbytes > end:
                return None
            major, minor = (int(part, 16) for part in fields[3].split(b":"))
            # The kernel escapes line ends only.
            path = os.fsdecode(fields[5].replace(b"\\012", b"\n"))
            return FilePlace(path, int(fields[2], 16) + address - start, (os.makedev(major, minor), inode))
    return None


def _check_identity(place: FilePlace, name: str) -> None:
    """Compare the mapped file with the one that has its path now."""
    try:
        found = os.stat(place.path)  # noqa: PTH116
    except OSError as error:
        msg = f"{name}: {place.path} cannot be opened again: {error}; keep the model's files while the server runs"
        raise UnsupportedError(msg) from error
    # Some file systems (btrfs, overlay) give mappings other numbers than files. There, only the bytes are compared.
    if found.st_dev == place.identity[0] and found.st_ino != place.identity[1]:
        msg = f"{name}: {place.path} was replaced while it was loaded; start the server again"
        raise UnsupportedError(msg)


def _check_bytes(tensor: torch.Tensor, place: FilePlace, name: str) -> None:
    """Compare the first and the last row with the file: the mapping is private, so a loader may have changed it."""
    import torch  # noqa: PLC0415

    if tensor.nbytes == 0:
        return
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.ndim else tensor.reshape(1, 1)
    row_bytes = rows[0].nbytes
    file = os.open(place.path, os.O_RDONLY)
    try:
        for index in {0, rows.shape[0] - 1}:
            stored = os.pread(file, row_bytes, place.offset + index * row_bytes)
            shown = rows[index].view(torch.uint8).numpy().tobytes()
            if stored != shown:
                msg = f"{name}: {place.path}: its loader changed the rows, so they cannot be read from the file"
                raise UnsupportedError(msg)
    finally:
        os.close(file)
