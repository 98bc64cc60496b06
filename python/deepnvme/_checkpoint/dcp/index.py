"""The folder of a distributed checkpoint, and its index ``deepnvme.json``: which file holds which part of a tensor."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from deepnvme._utils.public import to_absolute_path
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path

INDEX_NAME = "deepnvme.json"
_VERSION = 1
# Key of the record of the index's own files.
OWNED_KEY = "deepnvme.owned"
# Key of the fingerprints of its files, if it has a checksum.
_FILES_KEY = "deepnvme.files"
_CRC64 = re.compile(r"[0-9a-f]{16}")
# Names of shards. An index cannot refer to other files.
SHARD_NAME = re.compile(r"shard-[0-9]{5,}-[0-9a-f]{32}\.safetensors")

# Dtypes by torch's names. No other attribute of the module is looked up.
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# As in deepnvme-format, for archives.
_DIMS_MAX = 64
_DEPTH_MAX = 500
# Groups of at most `_PAIRED_MAX` chunks are compared pair by pair; larger ones are split first. A tensor whose
# groups have taken `_PAIRS_MAX` comparisons is refused at the next larger group that cannot be split. Grids need
# hardly any.
_PAIRED_MAX = 8
_PAIRS_MAX = 2_000_000


@dataclasses.dataclass
class ItemLocation:
    """Location of an item: the file, and the tensor in it."""

    file: str
    tensor: str


def encode(metadata: Metadata, locations: dict[MetadataIndex, ItemLocation]) -> dict[str, Any]:
    """Encode the index as JSON."""
    entries: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [
                [list(chunk.offsets), list(chunk.sizes), dataclasses.astuple(_find(locations, name, chunk.offsets))]
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            requires_grad = entry.properties.requires_grad
            entries[name] = {"dtype": dtype, "size": list(entry.size), "requires_grad": requires_grad, "chunks": chunks}
        else:
            entries[name] = {"bytes": dataclasses.astuple(_find(locations, name, None))}
    planner_data = metadata.planner_data
    if planner_data is not None:
        planner_data = {name: list(path) for name, path in planner_data.items()}
    return {"version": _VERSION, "entries": entries, "planner_data": planner_data}


def _find(locations: dict[MetadataIndex, ItemLocation], name: str, offset: Any) -> ItemLocation:
    found = locations.get(MetadataIndex(name, offset)) or locations.get(MetadataIndex(name))
    if found is None:
        msg = f"no rank wrote {name} at {offset}; the planner and the ranks disagree"
        raise RuntimeError(msg)
    return found


def decode(encoded: Any) -> Metadata:
    """Decode an index and check everything in it. Raises ``ValueError``."""
    entries: dict[str, Any] = {}
    locations: dict[MetadataIndex, ItemLocation] = {}
    version, listed = _field(encoded, "version"), _field(encoded, "entries")
    if type(version) is not int or version < _VERSION:
        raise _damaged(f"the version is {version!r}, which is no version number")
    if version > _VERSION:
        msg = f"version {version} needs a later deepnvme; upgrade"
        raise ValueError(msg)
    for name, entry in _items(listed, "entries"):
        if "bytes" in dict(_items(entry, name)):
            entries[name] = BytesStorageMetadata()
            locations[MetadataIndex(name)] = _decode_location(entry["bytes"])
            continue
        entries[name] = _decode_tensor(name, entry, locations)
    planner_data = _field(encoded, "planner_data")
    if planner_data is not None:
        planner_data = {name: _decode_path(name, path, entries) for name, path in _items(planner_data, "planner_data")}
    return Metadata(entries, planner_data=planner_data, storage_data=locations)


def decode_fingerprints(encoded: Any) -> dict[str, tuple[int, int]]:
    """Decode the size of each file and the checksum of its header. Raises ``ValueError``."""
    found: dict[str, tuple[int, int]] = {}
    for name, entry in _items(_field(encoded, _FILES_KEY), _FILES_KEY):
        nbytes, crc64 = _field(entry, "bytes"), _field(entry, "index_crc64")
        is_size = type(nbytes) is int and 0 <= nbytes < 1 << 64
        if not is_size or type(crc64) is not str or not _CRC64.fullmatch(crc64):
            raise _damaged(f"the size or checksum of {name} is invalid")
        found[name] = nbytes, int(crc64, 16)
    return found


def _decode_tensor(name: str, entry: Any, locations: dict[MetadataIndex, ItemLocation]) -> TensorStorageMetadata:
    """Decode a tensor's metadata, and record where its chunks are."""
    dtype, requires_grad = _DTYPES.get(str(_field(entry, "dtype"))), _field(entry, "requires_grad")
    if dtype is None:
        raise _damaged(f"{name} has the dtype torch.{entry['dtype']}, which does not exist")
    if not isinstance(requires_grad, bool):
        raise _damaged(f"requires_grad of {name} is not true or false")
    size = _counts(name, _field(entry, "size"))
    chunks = []
    for chunk in _list(name, _field(entry, "chunks")):
        offsets, sizes, location = _list(name, chunk, 3)
        offsets, sizes = _counts(name, offsets), _counts(name, sizes)
        is_within = len(offsets) == len(sizes) == len(size) and all(
            offset + length <= total for offset, length, total in zip(offsets, sizes, size, strict=True)
        )
        if not is_within or MetadataIndex(name, offsets) in locations:
            raise _damaged(f"a chunk of {name} is out of bounds, or listed twice")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        locations[MetadataIndex(name, offsets)] = _decode_location(location)
    # Elements outside of all chunks would silently keep their old values.
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not chunks or covered != math.prod(size) or _overlap(name, chunks):
        raise _damaged(f"the chunks of {name} overlap, or do not cover it")
    properties = TensorProperties(dtype=dtype, requires_grad=requires_grad)
    return TensorStorageMetadata(properties, torch.Size(size), chunks)


def _overlap(name: str, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two chunks of this tensor share an element."""
    waiting = [[chunk for chunk in chunks if math.prod(chunk.sizes)]]
    pairs_left = _PAIRS_MAX
    while waiting:
        group = waiting.pop()
        parts = _separated(group) if len(group) > _PAIRED_MAX else [group]
        if len(parts) > 1:
            waiting.extend(parts)
            continue
        pairs_left -= len(group) * len(group) // 2
        for number, chunk in enumerate(group):
            if any(_share_elements(other, chunk) for other in group[:number]):
                return True
            if pairs_left < 0 and number > _PAIRED_MAX:
                msg = f"the chunks of {name} interleave too much to be checked for overlaps"
                raise ValueError(msg)
    return False


def _separated(chunks: list[ChunkStorageMetadata]) -> list[list[ChunkStorageMetadata]]:
    """Split chunks where a plane passes between them: no chunk of one part overlaps one of another."""
    for dimension in range(len(chunks[0].sizes)):
        parts: list[list[ChunkStorageMetadata]] = []
        end = -1
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dimension]):
            if chunk.offsets[dimension] >= end:
                parts.append([])
            parts[-1].append(chunk)
            end = max(end, chunk.offsets[dimension] + chunk.sizes[dimension])
        if len(parts) > 1:
            return parts
    return [chunks]


def _share_elements(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    """Whether two chunks have an element in common."""
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in pairs)


def _decode_path(name: str, path: Any, entries: dict[str, Any]) -> tuple[str | int, ...]:
    """Decode the path of an entry. A list index is below the number of entries: every item has its own."""
    parts = _list(name, path)
    is_path = all(type(part) is str or (type(part) is int and 0 <= part < max(len(entries), 1)) for part in parts)
    if not parts or not is_path or len(parts) > _DEPTH_MAX:
        raise _damaged(f"the path of {name} is invalid")
    return tuple(parts)


def _field(encoded: Any, name: str) -> Any:
    if not isinstance(encoded, dict) or name not in encoded:
        raise _damaged(f"it does not contain {name}")
    return encoded[name]


def _items(encoded: Any, what: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(encoded, dict):
        raise _damaged(f"{what} is not an object")
    return encoded.items()


def _list(name: str, encoded: Any, length: int | None = None) -> list[Any]:
    if not isinstance(encoded, list) or length not in (None, len(encoded)):
        raise _damaged(f"{name} needs a list here")
    return encoded


def _counts(name: str, encoded: Any) -> list[int]:
    numbers = _list(name, encoded)
    is_size = all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
    # torch counts elements with 63 bits, even for empty tensors.
    if not is_size or len(numbers) > _DIMS_MAX or math.prod(max(number, 1) for number in numbers) >= 1 << 63:
        raise _damaged(f"{name} has an impossible size")
    return numbers


def _decode_location(encoded: Any) -> ItemLocation:
    file, tensor = _list("the location of an entry", encoded, 2)
    if type(file) is not str or not SHARD_NAME.fullmatch(file):
        raise _damaged(f"{file!r} is not a file of this folder")
    if type(tensor) is not str:
        raise _damaged(f"{tensor!r} is not the name of a tensor")
    return ItemLocation(file, tensor)


def _damaged(what: str) -> ValueError:
    return ValueError(f"{what}; restore the file from a copy, or load another checkpoint")


class CheckpointFolder:
    """A folder that is given to the constructor of ``owner``, or as ``checkpoint_id`` to ``function``."""

    def __init__(self, path: str | os.PathLike[str] | None, owner: str, function: str) -> None:
        self.given: Path | None = None
        self._owner, self._function = owner, function
        self.replace(path)

    @property
    def path(self) -> Path:
        """The absolute path."""
        if self.given is None:
            msg = f"no folder was given; pass a path to {self._owner}, or a checkpoint_id to {self._function}"
            raise InvalidArgumentError(msg)
        return self.given

    def replace(self, path: str | os.PathLike[str] | None) -> None:
        """Use another folder, if there is one."""
        if path is not None:
            self.given = to_absolute_path(path)
