"""File layout: safetensors, with the data starting at a page boundary.

Eight bytes of header length, a JSON header padded with spaces, then all tensors without gaps. Tensors whose size is a
multiple of the page come first, so that they all start at page boundaries.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

PAGE_BYTES = 4096
LENGTH = struct.Struct("<Q")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of the file. `offset` counts bytes from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def empty(self) -> torch.Tensor:
        """Allocate memory for it."""
        return torch.empty(self.shape, dtype=self.dtype)

    @staticmethod
    def bytes_of(tensor: torch.Tensor) -> memoryview:
        """Return the memory of a contiguous tensor as a buffer, without a copy."""
        data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
        return data


def plan(state: dict[str, torch.Tensor]) -> tuple[bytes, list[Entry]]:
    """Return the header, and the tensors in file order."""
    order = sorted(state, key=lambda name: state[name].nbytes % PAGE_BYTES != 0)
    described, begin = {}, 0
    for name in order:
        tensor = state[name]
        end = begin + tensor.nbytes
        described[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described, separators=(",", ":")).encode()
    padded = text.ljust(-(-(LENGTH.size + len(text)) // PAGE_BYTES) * PAGE_BYTES - LENGTH.size)
    return LENGTH.pack(len(padded)) + padded, entries(padded)


def parse(read: Callable[[int], bytes | None]) -> list[Entry]:
    """Read the header from the start of a file with its `read` method. Return its tensors."""
    (length,) = LENGTH.unpack(read(LENGTH.size) or b"")
    return entries(read(length) or b"")


def entries(header: bytes) -> list[Entry]:
    """Return the tensors that a header lists."""
    data = LENGTH.size + len(header)
    return [
        Entry(name, DTYPES[field["dtype"]], tuple(field["shape"]), data + field["data_offsets"][0])
        for name, field in json.loads(header).items()
    ]
