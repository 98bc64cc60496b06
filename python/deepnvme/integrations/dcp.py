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
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import deepnvme._file as file
from deepnvme._checkpoint.leftovers import remove, remove_stale
from deepnvme._checkpoint.writing import SaveOptions, described, start_tensors
from deepnvme.integrations._dcp_index import NAME, SHARDS, Place, encode
from deepnvme.integrations._dcp_reader import DeepnvmeReader

if TYPE_CHECKING:
    from typing import Literal

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from deepnvme._deepnvme import Engine, _Saving

__all__ = ["DeepnvmeReader", "DeepnvmeWriter"]


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
            results.append(WriteResult(item.index, tensor.nbytes, Place(plan.storage_data, name)))
        if tensors:
            self._finish_shard(start_tensors(self._folder / plan.storage_data, described(tensors), self._options))
        future.set_result(results)
        return future

    def _finish_shard(self, saving: _Saving) -> None:
        """Wait until the file of this rank is on the disk."""
        saving.wait(None, True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the new checkpoint the one that counts, and remove the files of the old one."""
        places = {result.index: result.storage_data for part in results for result in part}
        wire = encode(metadata, places)
        with file.open(
            self._folder / NAME, "wb", engine=self._options.engine, durability=self._options.durability
        ) as out:
            out.write(json.dumps(wire).encode())
        kept = {place.file for place in places.values()}
        for path in self._folder.iterdir():
            if SHARDS.fullmatch(path.name) and path.name not in kept:
                remove(path)
        # Names of shards do not come again: what killed ranks left would stay for ever.
        remove_stale(self._folder, SHARDS)

    def storage_meta(self) -> StorageMeta | None:
        """Say where the checkpoint goes."""
        return StorageMeta(checkpoint_id=self._path)

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
