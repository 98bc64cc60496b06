"""Arguments as callers give them: whole numbers, paths, and sizes such as ``"4GB"`` or ``"512 MiB"``.

Suffixes of sizes are powers of 1024.
"""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path
from typing import SupportsIndex

from deepnvme.errors import InvalidArgumentError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?\s*", re.IGNORECASE)
# A file, or memory, has no more bytes.
WHOLE_MAX = (1 << 63) - 1
# Letters that a message has of what does not fit.
_SHOWN_MAX = 100


def whole(value: object, name: str, low: int = 0, high: int = WHOLE_MAX) -> int:
    """Take an argument for a whole number: the one conversion of those that reach the extension.

    Args:
        value: what the caller has passed.
        name: of the argument, for the message.
        low: the least that it may be.
        high: the most.

    Raises:
        InvalidArgumentError: it is outside the range.
        TypeError: it is no integer, but a float, a bool or a text.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is not None and low <= number <= high:
        return number
    text = f"{name} is {_shown(value)}; it must be a whole number between {low} and {high}"
    if number is None:
        raise TypeError(text)
    raise InvalidArgumentError(text)


def parse_bytes(size: object, name: str = "memory") -> int:
    """Read a number of bytes, at least one: ``4_000_000_000``, ``"4GB"``, ``"1.5G"``, ``"512MiB"``.

    Args:
        size: what was written.
        name: of the setting, for the message.

    Raises:
        InvalidArgumentError: it is no such size.
    """
    nbytes: float = 0
    if isinstance(size, str):
        if parts := _SIZE.fullmatch(size):
            nbytes = float(parts[1]) * _UNITS[parts[2].upper()]
    elif isinstance(size, SupportsIndex) and not isinstance(size, bool):
        nbytes = operator.index(size)
    if 1 <= nbytes <= WHOLE_MAX:
        return int(nbytes)
    range_ = f"between 1 and {WHOLE_MAX}"
    text = f"{name} is {_shown(size)}; it must be a size such as '4GB' or '512MiB', or a number of bytes {range_}"
    raise InvalidArgumentError(text)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


def path_of(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """Make a path of whatever names a file.

    Raises:
        TypeError: it names none.
    """
    return Path(os.fsdecode(path))
