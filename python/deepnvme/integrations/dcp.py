"""``torch.distributed.checkpoint`` on deepnvme: a storage writer and a storage reader.

A checkpoint is a folder: each rank writes what it has into one safetensors file, and ``deepnvme.json``, which the
coordinator replaces at once when all files are on disk, says which files and which parts of which tensors they hold.
Until then the old checkpoint of that folder is the one that counts. Nothing in it is a pickle but what the planner
pickles (values that are no tensors).

Example::

    import torch.distributed.checkpoint as dcp
    from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

    dcp.save(state, storage_writer=DeepnvmeWriter("step_100"))
    dcp.load(state, storage_reader=DeepnvmeReader("step_100"))  # also at another world size
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

import deepnvme._file as file
from deepnvme._checkpoint.writing import SaveOptions, described, start_tensors
from deepnvme._deepnvme import _CheckpointReader, default_engine
from deepnvme.errors import CorruptFileError

if TYPE_CHECKING:
    from typing import Literal

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem

    from deepnvme._deepnvme import Engine

NAME = "deepnvme.json"
_VERSION = 1
# What shards are called: nothing else in the folder is ever removed.
_SHARDS = re.compile(r"shard-\d{5,}-[0-9a-f]{8}\.safetensors")


@dataclasses.dataclass
class _Place:
    """Where an item is: the file, and the tensor in it."""

    file: str
    tensor: str


class DeepnvmeWriter(StorageWriter):
    """Writes the parts of a distributed state, each rank its own.

    Args:
        path: the folder. ``dcp.save(checkpoint_id=...)`` replaces it.
        engine: which engine moves the bytes. Default: the default engine.
        durability: as for ``deepnvme.save``. Default ``"full"``.
        checksums: as for ``deepnvme.save``. Default True.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        engine: Engine | None = None,
        durability: Literal["none", "data", "full"] = "full",
        checksums: bool = True,
    ) -> None:
        super().__init__()
        self._path = None if path is None else Path(path)
        self._options = SaveOptions(engine, durability, checksums)

    @property
    def _folder(self) -> Path:
        if self._path is None:
            msg = "no folder was named; give DeepnvmeWriter a path, or dcp.save a checkpoint_id"
            raise ValueError(msg)
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the folder of the next save."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Make the folder."""
        del is_coordinator
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the file of each rank: a name of its own, so that those of the old checkpoint stay what they are."""
        token = secrets.token_hex(4)
        names = [f"shard-{rank:05}-{token}.safetensors" for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has."""
        future: Future[list[WriteResult]] = Future()
        tensors: dict[str, torch.Tensor] = {}
        results = []
        for item in plan.items:
            name, tensor = _name_of(item), _tensor_of(item, planner)
            tensors[name] = tensor
            results.append(WriteResult(item.index, tensor.nbytes, _Place(plan.storage_data, name)))
        if tensors:
            start_tensors(self._folder / plan.storage_data, described(tensors), self._options).wait(None, True)
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the new checkpoint the one that counts, and remove the files of the old one."""
        places = {result.index: result.storage_data for part in results for result in part}
        wire = _encode(metadata, places)
        with file.open(
            self._folder / NAME, "wb", engine=self._options.engine, durability=self._options.durability
        ) as out:
            out.write(json.dumps(wire).encode())
        kept = {place.file for place in places.values()}
        for path in self._folder.iterdir():
            if _SHARDS.fullmatch(path.name) and path.name not in kept:
                path.unlink(missing_ok=True)

    def storage_meta(self) -> StorageMeta | None:
        """Say where the checkpoint goes."""
        return StorageMeta(checkpoint_id=self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether a folder can be that: any path but an URL."""
        return "://" not in os.fspath(checkpoint_id)


class DeepnvmeReader(StorageReader):
    """Reads what :class:`DeepnvmeWriter` wrote, at any world size: of each tensor only the rows that are wanted.

    Args:
        path: the folder. ``dcp.load(checkpoint_id=...)`` replaces it.
        engine: which engine moves the bytes. Default: the default engine.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, engine: Engine | None = None) -> None:
        super().__init__()
        self._path = None if path is None else Path(path)
        self._engine = engine
        self._places: dict[MetadataIndex, _Place] = {}

    @property
    def _folder(self) -> Path:
        if self._path is None:
            msg = "no folder was named; give DeepnvmeReader a path, or dcp.load a checkpoint_id"
            raise ValueError(msg)
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the folder of the next load."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
        self._places = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read ``deepnvme.json``."""
        path = self._folder / NAME
        try:
            return _decode(json.loads(path.read_text()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            msg = f"{path}: this is no checkpoint of deepnvme.integrations.dcp ({error})"
            raise CorruptFileError(msg) from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Remember where everything is."""
        del is_coordinator
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants, as one batch, straight into its tensors where these can be filled."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        batch: list[tuple[Path, int, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor, ReadItem]] = []
        for name, items in by_file.items():
            reader = _CheckpointReader(self._folder / name, self._engine, False)
            offsets = [storage[3] for storage in reader.storages()]
            there = {
                tensor[0]: (getattr(torch, tensor[1]), tensor[2], offsets[tensor[5]]) for tensor in reader.tensors()
            }
            for item in items:
                self._read(item, planner, self._folder / name, there, batch, copies)
        engine = default_engine() if self._engine is None else self._engine
        engine.read_batch(batch)
        for target, source, item in copies:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(bytes(source.tolist())))
            else:
                target.copy_(source)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(  # noqa: PLR0917
        self,
        item: ReadItem,
        planner: LoadPlanner,
        path: Path,
        there: dict[str, Any],
        batch: list[tuple[Path, int, torch.Tensor]],
        copies: list[tuple[torch.Tensor, torch.Tensor, ReadItem]],
    ) -> None:
        dtype, shape, offset = there[self._places[item.storage_index].tensor]
        if item.type == LoadItemType.BYTE_IO:
            buffer = torch.empty(shape, dtype=torch.uint8)
            batch.append((path, offset, buffer))
            copies.append((buffer, buffer, item))
            return
        target = planner.resolve_tensor(item).detach()
        starts, lengths = list(item.storage_offsets), list(item.lengths)
        if dtype == torch.uint8 and len(shape) != len(lengths):
            # An element type that safetensors does not have was saved as bytes.
            dtype = target.dtype
            shape = [*shape[:-1]] if len(shape) == len(lengths) + 1 else shape
        # Whole rows lie side by side; of those, what is wanted of each is cut out in memory.
        row = 1
        for size in shape[1:]:
            row *= size
        first, rows = (starts[0], lengths[0]) if shape else (0, 1)
        place = offset + first * row * dtype.itemsize
        is_whole_rows = lengths[1:] == list(shape[1:])
        is_plain = target.device.type == "cpu" and target.dtype == dtype and not target.is_conj()
        if is_whole_rows and is_plain:
            if target.numel():
                batch.append((path, place, target))
            planner.commit_tensor(item, target)
            return
        source = torch.empty([rows, *shape[1:]] if shape else [], dtype=dtype)
        if source.numel():
            batch.append((path, place, source))
        for dimension in range(1, len(shape)):
            source = source.narrow(dimension, starts[dimension], lengths[dimension])
        copies.append((target, source, item))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether a folder can be that: any path but an URL."""
        return "://" not in os.fspath(checkpoint_id)


def _name_of(item: WriteItem) -> str:
    index = item.index
    if index.offset is None or not any(index.offset):
        return index.fqn
    return f"{index.fqn}@{','.join(str(start) for start in index.offset)}"


def _tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    value = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(value, io.BytesIO)
        return torch.frombuffer(bytearray(value.getvalue()), dtype=torch.uint8)
    assert isinstance(value, torch.Tensor)
    tensor = value.detach().resolve_conj().resolve_neg()
    if tensor.dtype in (torch.complex128, torch.complex32):
        tensor = tensor.contiguous().unsqueeze(-1).view(torch.uint8)
    return tensor


def _encode(metadata: Metadata, places: dict[MetadataIndex, _Place]) -> dict[str, Any]:
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


def _find(places: dict[MetadataIndex, _Place], name: str, offset: Any) -> _Place:
    found = places.get(MetadataIndex(name, offset)) or places.get(MetadataIndex(name))
    if found is None:
        msg = f"no rank has written {name} at {offset}; the planner and the ranks disagree"
        raise RuntimeError(msg)
    return found


def _decode(wire: dict[str, Any]) -> Metadata:
    if wire["version"] != _VERSION:
        msg = f"version {wire['version']} is of a later deepnvme; upgrade"
        raise ValueError(msg)
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _Place] = {}
    for name, entry in wire["entries"].items():
        if "bytes" in entry:
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _place(entry["bytes"])
            continue
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            msg = f"{name} is of torch.{entry['dtype']}, which is no element type"
            raise TypeError(msg)
        chunks = []
        for offsets, sizes, place in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, offsets)] = _place(place)
        properties = TensorProperties(dtype=dtype, requires_grad=entry["requires_grad"])
        entries[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    planner_data = wire["planner_data"]
    if planner_data is not None:
        planner_data = {name: tuple(path) for name, path in planner_data.items()}
    return Metadata(entries, planner_data=planner_data, storage_data=places)


def _place(wire: list[str]) -> _Place:
    place = _Place(*wire)
    if not _SHARDS.fullmatch(place.file):
        msg = f"{place.file!r} is no file of this folder"
        raise ValueError(msg)
    return place
