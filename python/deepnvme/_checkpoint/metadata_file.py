"""Reading the small files that say what others hold."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepnvme.errors import CorruptFileError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader
    from pathlib import Path

# Far more than the names of the largest model's tensors take.
METADATA_BYTES_MAX = 1 << 30


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading, or raise ``CorruptFileError`` where it is not a regular one.

    Opening a named pipe would wait for its writer, and a device may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise CorruptFileError(f"{path}: this is not a regular file, but a socket") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptFileError(f"{path}: this is not a regular file")
    with open(descriptor, "rb") as file:  # noqa: PTH123 (it is open already)
        yield file


def read_metadata(path: Path) -> str:
    """Read a small text file, or raise ``CorruptFileError`` where it is not one."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
        if found.st_size > METADATA_BYTES_MAX:
            raise CorruptFileError(f"{path}: the file has more than {METADATA_BYTES_MAX} bytes, which no index needs")
        try:
            # Not as much as an index may have at the most: Python asks for that memory at once.
            content = file.read(found.st_size)
        except MemoryError as error:
            raise OutOfMemoryError(f"{path}: there is no memory for its {found.st_size} bytes") from error
    try:
        return content.decode()
    except MemoryError as error:
        raise OutOfMemoryError(f"{path}: there is no memory for the text of its {found.st_size} bytes") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path}: this is no text ({error})") from error
