"""Where the parts of a distributed checkpoint are: ``deepnvme.json``."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

NAME = "deepnvme.json"
_VERSION = 1
# What shards are called: nothing else in the folder is ever removed.
SHARDS = re.compile(r"shard-[0-9]{5,}-[0-9a-f]{8}\.safetensors")


@dataclasses.dataclass
class Place:
    """Where an item is: the file, and the tensor in it."""

    file: str
    tensor: str


def encode(metadata: Metadata, places: dict[MetadataIndex, Place]) -> dict[str, Any]:
    """Say it in JSON."""
    entries: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [
                [list(chunk.offsets), list(chunk.sizes), dataclasses.astuple(_find(places, name, chunk.offsets))]
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            requires_grad = entry.properties.requires_grad
            entries[name] = {"dtype": dtype, "size": list(entry.size), "requires_grad": requires_grad, "chunks": chunks}
        else:
            entries[name] = {"bytes": dataclasses.astuple(_find(places, name, None))}
    planner_data = metadata.planner_data
    if planner_data is not None:
        planner_data = {name: list(path) for name, path in planner_data.items()}
    return {"version": _VERSION, "entries": entries, "planner_data": planner_data}


def _find(places: dict[MetadataIndex, Place], name: str, offset: Any) -> Place:
    found = places.get(MetadataIndex(name, offset)) or places.get(MetadataIndex(name))
    if found is None:
        msg = f"no rank has written {name} at {offset}; the planner and the ranks disagree"
        raise RuntimeError(msg)
    return found


def decode(wire: dict[str, Any]) -> Metadata:
    """Understand what ``encode`` said, or raise ``KeyError``, ``TypeError`` or ``ValueError``."""
    if wire["version"] != _VERSION:
        msg = f"version {wire['version']} is of a later deepnvme; upgrade"
        raise ValueError(msg)
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, entry in wire["entries"].items():
        if "bytes" in entry:
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _place_of(entry["bytes"])
            continue
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            msg = f"{name} is of torch.{entry['dtype']}, which is no element type"
            raise TypeError(msg)
        chunks = []
        for offsets, sizes, place in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, offsets)] = _place_of(place)
        properties = TensorProperties(dtype=dtype, requires_grad=entry["requires_grad"])
        entries[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    planner_data = wire["planner_data"]
    if planner_data is not None:
        planner_data = {name: tuple(path) for name, path in planner_data.items()}
    return Metadata(entries, planner_data=planner_data, storage_data=places)


def _place_of(wire: list[str]) -> Place:
    place = Place(*wire)
    if not SHARDS.fullmatch(place.file):
        msg = f"{place.file!r} is no file of this folder"
        raise ValueError(msg)
    return place
