"""The files of a saved state: the tensors and storages of each, and loads whose files are replaced meanwhile."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from deepnvme._deepnvme import StripeSet, _find_set
from deepnvme._utils.gc_pause import gc_paused
from deepnvme.errors import ChecksumError, CorruptFileError, Error

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from deepnvme._deepnvme import _CheckpointReader

    _Result = TypeVar("_Result")

SourcePath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | StripeSet
# Times that a set of files may be replaced during one load.
_REPLACEMENTS_MAX = 100


class SourceFile(NamedTuple):
    """A file of the state to load."""

    path: Any
    names: list[str] | None = None
    """The tensors that an index lists for this file. ``None``: all."""
    fingerprint: tuple[int, int] | None = None
    """The file that the index means: its size, and the checksum of its own index."""


def find_files(path: SourcePath, verify: str) -> list[SourceFile]:
    """Return the files that a path refers to. An index is compared with its checksum unless ``verify`` is ``"off"``."""
    if isinstance(path, StripeSet):
        return [SourceFile(_current_stripe_set(path))]
    return [SourceFile(*found) for found in _find_set(path, verify != "off")]


def _current_stripe_set(given: StripeSet) -> StripeSet:
    """Return the files of a stripe set now: a save to the set gives its parts new names, which the manifest lists."""
    try:
        return StripeSet.from_manifest(given.manifest_path)
    except FileNotFoundError:
        return given


class TensorEntry(NamedTuple):
    """A tensor of a file. The extension returns a plain tuple."""

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
    """A storage of a file: the bytes of one or more tensors. In a safetensors file each tensor has its own.

    The extension returns a plain tuple.
    """

    name: str
    nbytes: int
    location: str
    """The device it was saved from, as torch spells it."""
    offset: int
    """Offset in the file, in bytes."""


@gc_paused
def tensor_entries(reader: _CheckpointReader, numbers: list[int] | None = None) -> list[TensorEntry]:
    """Return the tensors in the order of the file, or those of these numbers."""
    return [*map(TensorEntry._make, reader.tensors(numbers))]


@gc_paused
def storage_entries(reader: _CheckpointReader) -> list[StorageEntry]:
    """Return the storages. ``TensorEntry.storage`` is an index into this list."""
    return [*map(StorageEntry._make, reader.storages())]


def for_files(path: SourcePath, verify: str, work: Callable[[list[SourceFile]], _Result]) -> _Result:
    """Run ``work`` on the files that a path refers to. If they are replaced meanwhile, run it on the new ones.

    A save of several files removes the old ones once the new index is there. A reader of the old index then misses a
    file, or finds another under its name. ``verify`` is that of :func:`find_files`.
    """
    files = find_files(path, verify)
    for _ in range(_REPLACEMENTS_MAX):
        try:
            return work(files)
        except (FileNotFoundError, CorruptFileError, ChecksumError):  # noqa: PERF203 (rarely more than once)
            now = find_files(path, verify)
            if now == files:
                raise
            files = now
    name = os.fsdecode(path) if isinstance(path, bytes) else path
    msg = f"{name}: its files were replaced again and again during the load; load it again"
    raise Error(msg)
