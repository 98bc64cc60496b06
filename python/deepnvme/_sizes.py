"""Sizes as people write them, ``"4GB"`` or ``"512 MiB"``: suffixes are powers of 1024, as on the command line."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?\s*", re.IGNORECASE)


def parse_bytes(size: str | int, name: str = "memory") -> int:
    """Read a number of bytes, at least one: ``4_000_000_000``, ``"4GB"``, ``"1.5G"``, ``"512MiB"``.

    Args:
        size: what was written.
        name: of the setting, for the message.

    Raises:
        ValueError: it is no such size.
    """
    nbytes = 0
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    elif isinstance(size, str) and (parts := _SIZE.fullmatch(size)):
        nbytes = int(float(parts[1]) * _UNITS[parts[2].upper()])
    if nbytes < 1:
        raise ValueError(f"{name} is {size!r}; it must be a size such as '4GB' or '512MiB', or a number of bytes")
    return nbytes
