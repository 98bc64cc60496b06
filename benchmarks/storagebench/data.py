"""Random contents, stamps that make every write differ, and verification of every byte."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from storagebench.settings import MIB, PAGE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES = 64 * MIB
_SAMPLED_PAGES = 256


class Mismatch(RuntimeError):
    """A tool transferred wrong bytes."""


def random_tensor(size: int) -> torch.Tensor:
    """Return `size` random bytes (a multiple of 8), different in every run."""
    words = np.random.SFC64().random_raw(size // 8)
    return torch.from_numpy(words.view(np.uint8))


def fill(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy `source` into `target` and return `target`."""
    target.copy_(source)
    return target


def stamp(tensor: torch.Tensor) -> None:
    """Change 8 bytes of every page, so that old file contents or old memory do not pass for new ones."""
    words = tensor.numpy()[: tensor.numel() // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
    words[:, :8] = np.frombuffer(os.urandom(8), np.uint8)


def check_memory(name: str, got: torch.Tensor, wanted: torch.Tensor, *, every_byte: bool) -> None:
    """Compare read bytes with the file: every byte, or 256 random pages.

    Raises:
        Mismatch: at the first difference.
    """
    if got.numel() != wanted.numel():
        raise Mismatch(f"{name}: read {got.numel()} bytes instead of {wanted.numel()}")
    for at, length in _ranges(wanted.numel(), every_byte=every_byte):
        if not torch.equal(got[at : at + length], wanted[at : at + length]):
            raise Mismatch(f"{name}: wrong bytes in memory in [{at}, {at + length})")


def check_file(name: str, path: Path, wanted: torch.Tensor, *, skip: int = 0, every_byte: bool) -> None:
    """Compare a written file with its source, read through the page cache; `skip` is the length of a header.

    Raises:
        Mismatch: at the first difference, or when the file is too short.
    """
    size = path.stat().st_size
    if size < skip + wanted.numel():
        raise Mismatch(f"{name}: the file has {size} bytes, wanted {skip + wanted.numel()}")
    buffer = np.empty(min(_CHUNK_BYTES, wanted.numel()), np.uint8)
    with path.open("rb", buffering=0) as file:
        for at, length in _ranges(wanted.numel(), every_byte=every_byte):
            file.seek(skip + at)
            view = buffer.data[:length]
            if file.readinto(view) != length or not np.array_equal(
                buffer[:length],
                wanted[at : at + length].numpy(),
            ):
                raise Mismatch(f"{name}: wrong bytes in the file in [{at}, {at + length})")


def _ranges(size: int, *, every_byte: bool) -> list[tuple[int, int]]:
    if every_byte or size <= _SAMPLED_PAGES * PAGE_BYTES:
        return [(at, min(_CHUNK_BYTES, size - at)) for at in range(0, size, _CHUNK_BYTES)]
    pages = np.random.default_rng().integers(0, size // PAGE_BYTES, _SAMPLED_PAGES)
    return [(int(page) * PAGE_BYTES, PAGE_BYTES) for page in pages]
