"""Sizes as people write them in settings: ``"4GB"``, ``"512 MiB"``, ``1048576``."""

from __future__ import annotations

import math
import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def size_in_bytes(size: int | str, name: str) -> int:
    """Bytes of a size: a number, or a text with a unit of powers of ten (GB) or of two (GiB); at least one byte.

    Args:
        size: what was written.
        name: of the setting, for the message.

    Raises:
        ValueError: it is no such size.
    """
    nbytes = 0
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    elif isinstance(size, str) and (parts := _SIZE.fullmatch(size)) and parts[2].lower() in _UNITS:
        nbytes = math.floor(float(parts[1]) * _UNITS[parts[2].lower()])
    if nbytes < 1:
        msg = f"{name} is {size!r}; it must be a size such as '4GB', '512MiB' or a number of bytes"
        raise ValueError(msg)
    return nbytes
