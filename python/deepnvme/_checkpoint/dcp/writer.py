"""The storage writer of ``deepnvme.integrations.dcp``, and what the plans of its ranks must agree on."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from deepnvme._checkpoint.dcp.index import INDEX_NAME, OWNED_KEY, CheckpointFolder, ItemLocation, decode, encode
from deepnvme._checkpoint.dcp.values import check_loadable
from deepnvme._checkpoint.pickler import warn_of_refused_values
from deepnvme._checkpoint.save import SaveOptions, checked_tensors, fingerprints, plan_safetensors
from deepnvme._deepnvme import _CheckpointReader, _make_folders, _SetReplacement
from deepnvme._utils.gc_pause import GcPause, gc_paused
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.public import public_in
from deepnvme.errors import InvalidArgumentError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Literal

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from deepnvme._deepnvme import Engine, _Saving

# Any rank may write a tensor of at least this size, to balance the work. A smaller one comes from the first rank that
# has it.
BALANCED_BYTES_MIN = 256 << 10


@public_in("deepnvme.integrations.dcp")
class DeepnvmeWriter(StorageWriter):
    """Write a distributed state, each rank its own part.

    Args:
        path: the folder. ``dcp.save(checkpoint_id=...)`` overrides it.
        engine: the engine that transfers the bytes. Default: the default engine.
        durability: as for ``deepnvme.save``. Default ``"full"``.
        checksums: as for ``deepnvme.save``. Default True.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.

    Errors of a save are in ``failures`` of torch's ``CheckpointException``, by rank: :class:`deepnvme.Error` if the
    disk fails, and ``ValueError`` if ranks disagree about a tensor.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from deepnvme.integrations.dcp import DeepnvmeWriter
        >>> saved = dcp.save({"weight": torch.ones(2, 3)}, storage_writer=DeepnvmeWriter("step_100"))
        >>> deepnvme.verify("step_100")["is_sound"]
        True
    """

    # Whether to warn of values that a load will refuse.
    _warns = True

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        engine: Engine | None = None,
        durability: Literal["none", "data", "full"] = "full",
        checksums: bool = True,
    ) -> None:
        super().__init__()
        self._folder = CheckpointFolder(path, "DeepnvmeWriter", "dcp.save")
        self._options = SaveOptions(engine, durability, checksums)
        # On the coordinator: the files of all ranks, until the index lists them.
        self._new: _SetReplacement | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the next save."""
        self._folder.replace(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Create the folder."""
        del is_coordinator
        if not kwargs.get("use_collectives", True) and (_world_size() > 1 or kwargs.get("rank") not in (None, 0)):
            # Each rank would replace the index by one of its own files. All ranks refuse: a single rank that continued
            # would replace the old checkpoint by its part of the new one.
            folder = self._folder.path
            msg = f"{folder}: DeepnvmeWriter needs one index of all ranks' files; save with use_collectives=True"
            raise UnsupportedError(msg)
        _make_folders(self._folder.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create a file with a new name for each rank, so that the old checkpoint stays as it is."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            msg = f"{self._folder.path}: cached plans name files of an earlier save; use enable_plan_caching=False"
            raise UnsupportedError(msg)
        # Chunks of different dtypes would be a checkpoint that nothing can read.
        check_plans(plans, lambda rank: f"rank {rank}")
        self.give_up()
        ranks = [rank for rank, plan in enumerate(plans) if plan.items]
        members = [(self._folder.path / f"shard-{rank:05}-", ".safetensors") for rank in ranks]
        self._new = _SetReplacement(self._folder.path / INDEX_NAME, members, [OWNED_KEY])
        pairs = zip(self._new.members, self._new.names, strict=True)
        # The private name to write to, and the name that the index lists.
        names = {rank: (member.name, name.name) for rank, (member, name) in zip(ranks, pairs, strict=True)}
        return [dataclasses.replace(plan, storage_data=names.get(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items."""
        try:
            return self._write_data(plan, planner)
        except BaseException:
            # No other rank still writes to its file. The traceback may keep this object alive.
            if _world_size() == 1:
                self.give_up()
            raise

    def _write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        tensors: dict[str, torch.Tensor] = {}
        private, file = plan.storage_data or ("", "")
        if self._warns:
            warn_of_refused_values(_values(plan, planner))
        with GcPause():
            for item in plan.items:
                tensors[_free_name(item, tensors)] = _tensor_of(item, planner, self._options.engine)
            named = checked_tensors(tensors)
            results = [
                WriteResult(item.index, tensor.nbytes, ItemLocation(file, name))
                for item, (name, tensor) in zip(plan.items, tensors.items(), strict=True)
            ]
        if tensors:
            path = self._folder.path / file
            try:
                shard = plan_safetensors(path, named, self._options)
                self._finish_shard(shard.start_into(self._folder.path / private))
            except FileNotFoundError as error:
                text = "the coordinator created this file, and this rank does not see it"
                msg = f"{path}: {text}; use a folder that all ranks share, and save again"
                raise NotFoundError(msg) from error
        future.set_result(results)
        return future

    def _finish_shard(self, saving: _Saving) -> None:
        """Wait until this rank's file is on disk."""
        saving.wait(None, True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Replace the index, and remove the files of the old checkpoint."""
        locations = {result.index: result.storage_data for part in results for result in part}
        new, self._new = self._new, None
        if new is None:
            msg = f"{self._folder.path}: no save is running"
            raise RuntimeError(msg)
        try:
            written = {location.file for location in locations.values()}
            private = {name.name: member for member, name in zip(new.members, new.names, strict=True)}
            found = {name: self._fingerprint(private[name]) for name in sorted(written)}
            with GcPause():
                index = json.dumps({**fingerprints(found), **encode(metadata, locations)})
                _check_readable(index)
            new.commit(index)
        finally:
            new.discard()

    def give_up(self) -> None:
        """Remove the files of an unfinished save."""
        new, self._new = self._new, None
        if new is not None:
            new.discard()

    def _fingerprint(self, path: Path) -> tuple[int, int]:
        """Return the size of a rank's file, and the checksum of its index."""
        reader = _CheckpointReader(path, self._options.engine, False)
        return reader.nbytes, reader.index_crc64()

    def storage_meta(self) -> StorageMeta | None:
        """Return the location of the checkpoint."""
        return StorageMeta(checkpoint_id=self._folder.given)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be a folder: any path except a URL."""
        return "://" not in os.fspath(checkpoint_id)


class ComparingPlanner(DefaultSavePlanner):
    """Compares the plans of all ranks before torch drops what several of them have.

    Args:
        name: returns the name of a rank, for errors.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        super().__init__()
        self._name = name

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Make the plan of each rank, on the coordinator."""
        check_plans(all_plans, self._name)
        return super().create_global_plan(keep_first_small(all_plans))


@gc_paused
def check_plans(plans: Sequence[SavePlan], name: Callable[[int], str]) -> None:
    """Raise if two ranks describe one entry differently.

    Raises:
        InvalidArgumentError: a tensor has another dtype or size at one of the ranks, or is not a tensor there.
    """
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            known_rank, known = first.setdefault(item.index.fqn, (rank, _description(item)))
            for what, value in _description(item).items():
                if known[what] != value:
                    msg = (
                        f"{item.index.fqn}: its {what} is {value} at {name(rank)} and {known[what]} at "
                        f"{name(known_rank)}; it must be the same everywhere"
                    )
                    raise InvalidArgumentError(msg)


def keep_first_small(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Drop small entries from all plans but the first that has them, so that its values are saved."""
    taken: set[Any] = set()
    left = []
    for plan in plans:
        left.append(dataclasses.replace(plan, items=[item for item in plan.items if item.index not in taken]))
        taken.update(item.index for item in plan.items if (item.tensor_storage_size() or 0) < BALANCED_BYTES_MIN)
    return left


def _check_readable(index: str) -> None:
    """Refuse an index that no load would accept: a name may be too long, or a path too deep."""
    try:
        decode(json.loads(index))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if is_of_handler(error):
            raise
        msg = f"the state cannot be saved so that it could be loaded: {error}"
        raise InvalidArgumentError(msg) from error


def _world_size() -> int:
    is_set_up = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_set_up else 1


def _free_name(item: WriteItem, taken: Collection[str]) -> str:
    """Return a name for an item in its rank's file: its tensor's name and offset, and ``@`` until it is free."""
    index = item.index
    name = index.fqn
    if index.offset is not None and any(index.offset):
        name = f"{name}@{','.join(map(str, index.offset))}"
    while name in taken:
        name += "@"
    return name


def _values(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """Return the values of a plan that are pickled, if the planner is one that has them."""
    lookup = getattr(planner, "lookup_object", None)
    items = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
    return {item.index.fqn: lookup(item.index) for item in items} if callable(lookup) else {}


def _tensor_of(item: WriteItem, planner: SavePlanner, engine: Engine | None) -> torch.Tensor:
    value = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(value, io.BytesIO)
        content = bytearray(value.getvalue())
        check_loadable(content, item.index.fqn, engine)
        return torch.frombuffer(content, dtype=torch.uint8)
    assert isinstance(value, torch.Tensor)
    tensor = value.detach()
    if tensor.dtype in (torch.complex128, torch.complex32):
        # safetensors has no such type.
        tensor = tensor.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)
    return tensor


def _description(item: WriteItem) -> dict[str, Any]:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return {"kind": "an object", "dtype": None, "size": None}
    data = item.tensor_data
    return {"kind": "a tensor", "dtype": data.properties.dtype, "size": tuple(data.size)}
