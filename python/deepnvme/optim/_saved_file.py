"""The file of an optimizer's state: a safetensors file, whose header says of each stretch which elements it has.

Groups lie in it as they lie in the swap file, each at a multiple of 4096 bytes, so that file systems can share their
blocks. What is between stretches are tensors called ``pad``, since the format knows no gaps.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.leftovers import MARK, remove_stale
from deepnvme.errors import CorruptFileError, Error
from deepnvme.optim._formats import BF16, CODES, FORMATS, FP32, Format

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGNED_BYTES = 4096
_NAME = "deepnvme.optimizer"
_VERSION = 1
# Larger headers no file has; safetensors itself has the same bound.
_HEADER_BYTES_MAX = 100_000_000
_DTYPES = {FP32: "F32", BF16: "BF16", CODES: "U8"}


@dataclass(frozen=True)
class Stretch:
    """Elements of a whole tensor, and where in a file one kind of their state is."""

    name: str
    kind: str
    begin: int
    count: int
    format: Format
    offset: int
    path: Path = field(default_factory=Path)

    @property
    def end(self) -> int:
        """Behind the last element."""
        return self.begin + self.count


@dataclass
class Saved:
    """What a file says of itself: settings of groups, counts of parameters, stretches."""

    groups: list[dict[str, Any]]
    counts: dict[str, dict[str, float]]
    stretches: list[Stretch]


def header(saved: Saved, nbytes: int) -> bytes:
    """Make the head of a file, whose length is a multiple of 4096; ``nbytes`` follow it."""
    tensors: dict[str, Any] = {}
    at, stretches = 0, sorted(saved.stretches, key=lambda one: one.offset)
    for one in stretches:
        _pad(tensors, at, one.offset)
        size = one.format.nbytes(one.count) if one.format is CODES else one.count * one.format.dtype.itemsize
        at = one.offset + size
        tensors[f"{one.name}.{one.kind}.{one.begin}"] = {
            "dtype": _DTYPES[one.format],
            "shape": [size // one.format.dtype.itemsize],
            "data_offsets": [one.offset, at],
        }
    _pad(tensors, at, nbytes)
    told = {
        "version": _VERSION,
        "groups": saved.groups,
        "counts": saved.counts,
        "stretches": [[one.name, one.kind, one.begin, one.count, one.format.name, one.offset] for one in stretches],
    }
    text = json.dumps({"__metadata__": {_NAME: json.dumps(told)}, **tensors}).encode()
    room = -(-(8 + len(text)) // ALIGNED_BYTES) * ALIGNED_BYTES
    return (room - 8).to_bytes(8, "little") + text.ljust(room - 8)


def _pad(tensors: dict[str, Any], begin: int, end: int) -> None:
    if begin < end:
        tensors[f"pad.{begin}"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def read(path: Path) -> Saved:
    """Read what a file says of itself, believing none of it unchecked; offsets are from its beginning.

    Raises:
        CorruptFileError: it is no such file, or cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not len("{}") <= length <= min(_HEADER_BYTES_MAX, size - 8):
            raise _corrupt(path, 0, f"its header would have {length} bytes, of {size}")
        text = file.read(length)
    try:
        told = json.loads(json.loads(text)["__metadata__"][_NAME])
        if told["version"] != _VERSION:
            raise _corrupt(path, 8, f"it has version {told['version']!r}, and this deepnvme reads {_VERSION}")
        saved = Saved([dict(group) for group in told["groups"]], {}, [])
        for name, counts in told["counts"].items():
            saved.counts[str(name)] = {str(one): float(count) for one, count in counts.items()}
        for name, kind, begin, count, form, offset in told["stretches"]:
            numbers = [int(begin), int(count), int(offset)]
            one = Stretch(str(name), str(kind), numbers[0], numbers[1], FORMATS[form], 8 + length + numbers[2], path)
            if min(numbers) < 0 or one.offset + one.format.nbytes(one.count) > size:
                raise _corrupt(path, one.offset, f"{name}.{kind} would end behind its {size} bytes")
            saved.stretches.append(one)
    except CorruptFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _corrupt(path, 8, f"its header is not that of save_state ({type(error).__name__}: {error})") from error
    return saved


def _corrupt(path: Path, offset: int, text: str) -> CorruptFileError:
    error = CorruptFileError(f"{path}: {text}; it was cut or damaged, or is something else: take another one")
    error.offset = offset
    return error


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Give a descriptor whose file takes that name once the block has ended well, and is on disk then."""
    # What a killed writer has left goes now; a living one holds the lock of its file.
    remove_stale(path.parent, re.compile(re.escape(path.name)))
    temporary = path.with_name(f".{path.name}{MARK}{secrets.token_hex(6)}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
        os.fsync(fd)
        os.fchmod(fd, 0o666 & ~_umask())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            text = f"{error.strerror}; what was there before is as it was; make room, or take another folder"
            raise Error(error.errno, text, str(path)) from error
        raise
    finally:
        os.close(fd)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    try:
        with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration):
        return 0o077
