"""Checks of arguments: whole numbers, paths, and sizes such as ``"4GB"`` or ``"512MiB"``."""

from __future__ import annotations

import operator
import os
from pathlib import Path

from deepnvme._deepnvme import _parse_bytes
from deepnvme.errors import InvalidArgumentError

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
    """Parse a number of bytes, at least one. All size arguments go through here, or through the same parser in Rust.

    ``"4GB"`` is 4 x 10^9 bytes, ``"4GiB"`` is 4 x 2^30. A bare letter (``"4G"``) is binary, as in fio and dd.

    Args:
        size: the argument.
        name: its name, for the message.

    Raises:
        InvalidArgumentError: the text is not a size, or the number is outside the range.
        TypeError: it is neither an integer nor a text.
    """
    return _parse_bytes(size, name)


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
