"""The tensors and storages of a file, by name. The extension returns plain tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deepnvme._deepnvme import _CheckpointReader


class TensorEntry(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    """As torch names it, such as ``"bfloat16"``."""
    shape: list[int]
    strides: list[int]
    """In elements."""
    storage_offset: int
    """Offset of its first element in the storage, in elements."""
    storage: int
    """Index of its storage, in the list of :func:`storage_entries`."""


class StorageEntry(NamedTuple):
    """A storage of a file: the bytes of one or more tensors. In a safetensors file each tensor has its own."""

    name: str
    nbytes: int
    location: str
    """The device it was saved from, as torch spells it."""
    offset: int
    """Offset in the file, in bytes."""


def tensor_entries(reader: _CheckpointReader, numbers: list[int] | None = None) -> list[TensorEntry]:
    """Return the tensors in the order of the file, or those of these numbers."""
    return [*map(TensorEntry._make, reader.tensors(numbers))]


def storage_entries(reader: _CheckpointReader) -> list[StorageEntry]:
    """Return the storages. ``TensorEntry.storage`` is an index into this list."""
    return [*map(StorageEntry._make, reader.storages())]
