"""Where the parts of a distributed checkpoint are: ``deepnvme.json``."""

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

if TYPE_CHECKING:
    from collections.abc import Iterable

INDEX_NAME = "deepnvme.json"
_VERSION = 1
# Where the list records which files are its own.
OWNED_KEY = "deepnvme.owned"
# What shards are called: a list leads nowhere else.
SHARD_NAME = re.compile(r"shard-[0-9]{5,}-[0-9a-f]{32}\.safetensors")

# The element types by torch's names: nothing else of the module is looked up.
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# As many as a loaded archive may have.
_DIMS_MAX = 64
_DEPTH_MAX = 500


@dataclasses.dataclass
class ItemLocation:
    """Where an item is: the file, and the tensor in it."""

    file: str
    tensor: str


def encode(metadata: Metadata, locations: dict[MetadataIndex, ItemLocation]) -> dict[str, Any]:
    """Say it in JSON."""
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
        msg = f"no rank has written {name} at {offset}; the planner and the ranks disagree"
        raise RuntimeError(msg)
    return found


def decode(wire: Any) -> Metadata:
    """Understand what ``encode`` said, believing none of it unchecked, or raise ``ValueError``."""
    entries: dict[str, Any] = {}
    locations: dict[MetadataIndex, ItemLocation] = {}
    version, listed = _field(wire, "version"), _field(wire, "entries")
    if version != _VERSION:
        msg = f"version {version!r} is of a later deepnvme; upgrade"
        raise ValueError(msg)
    for name, entry in _items(listed, "entries"):
        if "bytes" in dict(_items(entry, name)):
            entries[name] = BytesStorageMetadata()
            locations[MetadataIndex(name)] = _location_of(entry["bytes"])
            continue
        entries[name] = _tensor_of(name, entry, locations)
    planner_data = _field(wire, "planner_data")
    if planner_data is not None:
        planner_data = {name: _path_of(name, path, entries) for name, path in _items(planner_data, "planner_data")}
    return Metadata(entries, planner_data=planner_data, storage_data=locations)


def _tensor_of(name: str, entry: Any, locations: dict[MetadataIndex, ItemLocation]) -> TensorStorageMetadata:
    """Understand what a tensor is, and note where its chunks are."""
    dtype, requires_grad = _DTYPES.get(str(_field(entry, "dtype"))), _field(entry, "requires_grad")
    if dtype is None or not isinstance(requires_grad, bool):
        msg = f"{name} is of torch.{entry['dtype']}, which is no element type"
        raise ValueError(msg)
    size = _counts(name, _field(entry, "size"))
    chunks = []
    for chunk in _list(name, _field(entry, "chunks")):
        offsets, sizes, location = _list(name, chunk, 3)
        offsets, sizes = _counts(name, offsets), _counts(name, sizes)
        is_within = len(offsets) == len(sizes) == len(size) and all(
            first + count <= whole for first, count, whole in zip(offsets, sizes, size, strict=True)
        )
        if not is_within or MetadataIndex(name, offsets) in locations:
            msg = f"a chunk of {name} is not within it, or is there twice"
            raise ValueError(msg)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        locations[MetadataIndex(name, offsets)] = _location_of(location)
    # What no chunk has would stay what it was, in silence.
    if not chunks or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        msg = f"the chunks of {name} are not the whole of it"
        raise ValueError(msg)
    properties = TensorProperties(dtype=dtype, requires_grad=requires_grad)
    return TensorStorageMetadata(properties, torch.Size(size), chunks)


def _path_of(name: str, path: Any, entries: dict[str, Any]) -> tuple[str | int, ...]:
    """Understand the way to an entry. Each location of a list has an entry of its own, so none is beyond their number."""
    parts = _list(name, path)
    is_way = all(type(part) is str or (type(part) is int and 0 <= part < max(len(entries), 1)) for part in parts)
    if not parts or not is_way or len(parts) > _DEPTH_MAX:
        msg = f"the way to {name} is none"
        raise ValueError(msg)
    return tuple(parts)


def _field(wire: Any, name: str) -> Any:
    if not isinstance(wire, dict) or name not in wire:
        msg = f"it has no {name}"
        raise ValueError(msg)
    return wire[name]


def _items(wire: Any, what: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(wire, dict):
        msg = f"{what} is no object"
        raise ValueError(msg)  # noqa: TRY004 (a file is wrong, no argument)
    return wire.items()


def _list(name: str, wire: Any, length: int | None = None) -> list[Any]:
    if not isinstance(wire, list) or length not in (None, len(wire)):
        msg = f"{name} is described by something else than lists"
        raise ValueError(msg)
    return wire


def _counts(name: str, wire: Any) -> list[int]:
    numbers = _list(name, wire)
    is_size = all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
    # Torch counts elements with 63 bits, also those of a tensor that has none.
    if not is_size or len(numbers) > _DIMS_MAX or math.prod(max(number, 1) for number in numbers) >= 1 << 63:
        msg = f"{name} is of no size that a tensor has"
        raise ValueError(msg)
    return numbers


def _location_of(wire: Any) -> ItemLocation:
    file, tensor = _list("the location of an entry", wire, 2)
    if type(file) is not str or type(tensor) is not str or not SHARD_NAME.fullmatch(file):
        msg = f"{file!r} is no file of this folder"
        raise ValueError(msg)
    return ItemLocation(file, tensor)
