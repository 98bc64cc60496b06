"""Checks of arguments: whole numbers, paths, and sizes such as ``"4GB"`` or ``"512 MiB"``.

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
# The largest size of a file or of memory.
WHOLE_MAX = (1 << 63) - 1
# Characters of an invalid value that a message shows.
_SHOWN_MAX = 100


def whole(value: object, name: str, low: int = 0, high: int = WHOLE_MAX) -> int:
    """Convert an argument to a whole number. All numbers that reach the extension go through here.

    Args:
        value: the argument.
        name: its name, for the message.
        low: the smallest allowed value.
        high: the largest allowed value.

    Raises:
        InvalidArgumentError: it is outside the range.
        TypeError: it is not an integer, but a float, a bool or a text.
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
    """Parse a number of bytes, at least one: ``4_000_000_000``, ``"4GB"``, ``"1.5G"``, ``"512MiB"``.

    Args:
        size: the argument.
        name: its name, for the message.

    Raises:
        InvalidArgumentError: it is not a size.
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
    """Convert a path of any type to a ``Path``.

    Raises:
        TypeError: it is not a path.
    """
    return Path(os.fsdecode(path))
