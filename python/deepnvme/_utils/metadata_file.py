"""Metadata files, such as an index: read with a limit on their size, and warnings of files that only an old one lists.

A save to a set of files removes those that the old index lists. It keeps what is not its own, or was changed.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepnvme._deepnvme import StripeSet, _open_regular
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.public import first_of, warn_caller
from deepnvme.errors import CorruptFileError, Error, InvalidArgumentError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader

# Far more than the names of the largest model's tensors.
METADATA_BYTES_MAX = 1 << 30


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading, or raise ``CorruptFileError`` for a pipe, a device or a socket.

    Opening a named pipe would wait for a writer, and a device may never end.
    """
    try:
        descriptor = _open_regular(path)
    except InvalidArgumentError as error:
        raise CorruptFileError(str(error)) from error
    with open(descriptor, "rb") as file:  # noqa: PTH123 (it is open already)
        yield file


def read_metadata(path: Path) -> str:
    """Read a small text file, or raise ``CorruptFileError`` if it is not one."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
        if found.st_size > METADATA_BYTES_MAX:
            raise CorruptFileError(f"{path}: the file has more than {METADATA_BYTES_MAX} bytes, too many for an index")
        try:
            # Not up to the limit: Python would allocate that much at once.
            content = file.read(found.st_size)
        except MemoryError as error:
            raise OutOfMemoryError(f"{path}: there is not enough memory for its {found.st_size} bytes") from error
        except OSError as error:
            if is_of_handler(error):
                raise
            raise Error(error.errno, f"read: {error.strerror}", str(path)) from error
    try:
        return content.decode()
    except MemoryError as error:
        raise OutOfMemoryError(f"{path}: there is not enough memory for its {found.st_size} bytes of text") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path}: this is not a text file ({error})") from error


def parts_listed(stripe_set: StripeSet) -> tuple[str, ...]:
    """Return the parts that the manifest of a set lists."""
    try:
        return StripeSet.from_manifest(stripe_set.manifest_path).paths
    except (OSError, ValueError, Error) as error:
        if is_of_handler(error):
            raise
        return ()  # There is none, or the save refuses it.


def warn_of_kept_parts(stripe_set: StripeSet, before: tuple[str, ...]) -> None:
    """Warn of parts that the manifest listed before a save and that stay: ``write`` changed them in place."""
    now = {*parts_listed(stripe_set)}
    kept = [Path(part) for part in before if part not in now and os.path.lexists(part)]
    warn_of_kept(Path(stripe_set.manifest_path), kept)


def warn_of_kept(index: Path, kept: list[Path]) -> None:
    """Warn of files that the old ``index`` listed, if there are any."""
    if kept:
        text = "the old index listed files that are not its own, or were changed; they are kept:"
        warn_caller(f"{index}: {text} {first_of(kept)}")
