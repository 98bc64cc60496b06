"""Give the header of a packed table its right checksum, so that a test reaches the checks behind it."""

from __future__ import annotations

import re

_PLACE = re.compile(rb'header_crc32c\\":\\"([0-9a-f]{8})')


def compact(description: str) -> str:
    """Return a description with the key of its checksum as it is written."""
    return description.replace('"header_crc32c": "', '"header_crc32c":"')


def sealed(file: bytes) -> bytes:
    """Return a file whose header has its right checksum, if there is a place for it."""
    end = 8 + int.from_bytes(file[:8], "little")
    found = _PLACE.search(file[:end])
    if found is None:
        return file
    start, stop = found.span(1)
    without = file[:start] + b"00000000" + file[stop:end]
    return file[:start] + b"%08x" % _crc32c(without) + file[stop:]


def _crc32c(data: bytes) -> int:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF


def _entry(index: int) -> int:
    for _ in range(8):
        index = index >> 1 ^ (0x82F6_3B78 if index & 1 else 0)
    return index


_TABLE = [_entry(index) for index in range(256)]
