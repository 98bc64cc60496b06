"""Check the arguments of callers, convert them for the engine, and compare files with tensors after transfers.

The rules are those of DeepSpeed's native ops. A flag is anything with a truth value of its own: 0 and 1, but no string.
An integer is not a float. A buffer is a torch tensor. File names may also be `os.PathLike` or a stripe set.

With `validate=True`, the file is read again after a transfer. Plain Python reads it, so that an error of the engine
shows. Stripe sets are read with the engine.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
from typing import TypeAlias

import torch

from deepnvme._deepnvme import StripeSet
from deepnvme._deepnvme import read as read_bytes
from deepnvme._utils.public import WHOLE_MAX, whole
from deepnvme._utils.tensors import as_bytes
from deepnvme.errors import Error

# File names as callers pass them, and as the engine takes them.
FileName: TypeAlias = str | bytes | os.PathLike[str] | StripeSet
Name: TypeAlias = str | bytes | StripeSet
CHUNK_BYTES = 8 << 20

logger = logging.getLogger(__name__)


def tensor(value: object, name: str) -> torch.Tensor:
    """Return a torch tensor that is one block of memory, or raise `TypeError`."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            msg = f"{name} has the layout {value.layout}, which is not one block of memory; transfer {name}.to_dense()"
            raise TypeError(msg)
        return value
    msg = f"{name} is a {type(value).__name__}; it must be a torch.Tensor (for an array: torch.from_numpy(array))"
    raise TypeError(msg)


def integer(value: object, name: str, low: int = -WHOLE_MAX) -> int:
    """Return an integer of `low` or more, or raise `TypeError`, even for whole floats, or `ValueError`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        msg = f"{name} is {value!r}; it must be an int"
        raise TypeError(msg) from None
    # DeepSpeed's ops accept a bool as an integer.
    return whole(int(number), name, low)


def positive(value: object, name: str) -> int:
    """Return an integer of 1 or more, or raise `TypeError` or `ValueError`."""
    return integer(value, name, 1)


def natural(value: object, name: str) -> int:
    """Return an integer of 0 or more, or raise `TypeError` or `ValueError`."""
    return integer(value, name, 0)


def flag(value: object, name: str) -> bool:
    """Return the truth value of an object that defines one: a bool, number, None or numpy bool.

    Raises:
        TypeError: it defines none, for example a string: `"false"` would be true.
    """
    if hasattr(type(value), "__bool__"):
        return bool(value)
    msg = f"{name} is {value!r}; it must be a bool"
    raise TypeError(msg)


def filename(value: object, name: str = "filename") -> Name:
    """Return a file name: `str`, `bytes`, `os.PathLike` or `deepnvme.StripeSet`; otherwise raise `TypeError`."""
    if isinstance(value, (str, bytes, StripeSet)):
        return value
    if isinstance(value, os.PathLike):
        path: str | bytes = os.fspath(value)
        return path
    msg = f"{name} is {value!r}; it must be a str, bytes or os.PathLike"
    raise TypeError(msg)


def descriptor(value: object, name: str = "fd") -> int:
    """Return an open file descriptor, or raise `TypeError` or `ValueError`."""
    if isinstance(value, bool):
        msg = f"{name} is {value!r}; it must be an open file descriptor"
        raise TypeError(msg)
    return natural(value, name)


def compare(tensor: torch.Tensor, name: Name, offset: int) -> None:
    """Raise `deepnvme.Error` if the bytes of the file at `offset` differ from `tensor`."""
    expected = as_bytes(tensor.detach().cpu().contiguous())
    for start in range(0, expected.numel(), CHUNK_BYTES):
        part = expected[start : start + CHUNK_BYTES]
        found = _file_bytes(name, offset + start, part.numel())
        if not torch.equal(found, part):
            first = offset + start + _first_difference(found, part)
            msg = (
                f"validate: the file differs from the tensor, first at byte {first}; "
                "another process wrote to it, or the device returned wrong data"
            )
            raise Error(errno.EIO, msg, str(name))
    logger.info("validated %d bytes of %s at offset %d", expected.numel(), name, offset)


def _file_bytes(name: Name, offset: int, count: int) -> torch.Tensor:
    buffer = bytearray(count)
    found = torch.frombuffer(buffer, dtype=torch.uint8)
    if isinstance(name, StripeSet):
        read_bytes(found, name, offset)
        return found
    length = 0
    with open(name, "rb", buffering=0) as file:  # noqa: PTH123 - the name may be bytes
        file.seek(offset)
        while length < count:
            more = file.readinto(memoryview(buffer)[length:])
            if not more:
                break
            length += more
    return found[:length]


def _first_difference(found: torch.Tensor, expected: torch.Tensor) -> int:
    common = min(found.numel(), expected.numel())
    different = torch.nonzero(found[:common] != expected[:common])
    return int(different[0]) if different.numel() else common
