"""The storage reader of ``deepnvme.integrations.dcp``, and a planner whose errors name what a checkpoint lacks."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from deepnvme._checkpoint.dcp.index import INDEX_NAME, CheckpointFolder, ItemLocation, decode, decode_fingerprints
from deepnvme._checkpoint.dcp.shard import BufferedItem, Shard, request_groups
from deepnvme._checkpoint.dcp.values import OwnKeys, element, repickle_safely
from deepnvme._checkpoint.load_into import TargetOverlaps
from deepnvme._deepnvme import _list_state, default_engine
from deepnvme._utils.gc_pause import gc_paused
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.metadata_file import read_metadata
from deepnvme._utils.public import names_text, public_in
from deepnvme._utils.tensors import cast_refusal
from deepnvme.errors import ChecksumError, CorruptFileError, Error, InvalidArgumentError, OutOfMemoryError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable
    from typing import Literal

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from deepnvme._deepnvme import Engine


@public_in("deepnvme.integrations.dcp")
class DeepnvmeReader(StorageReader):
    """Read what :class:`DeepnvmeWriter` wrote, at any world size. Reads only the needed rows of each tensor.

    Args:
        path: the folder. ``dcp.load(checkpoint_id=...)`` overrides it.
        engine: the engine that transfers the bytes. Default: the default engine.
        verify: as for ``deepnvme.load``, for the data that this rank reads: ``"auto"`` (default), ``"off"``,
            ``"sample"`` or ``"full"``. If it reads a part of a tensor, the MiB around it are read again to compare
            them; with ``"auto"`` and ``"sample"``, only a sample of them.

    Raises:
        ValueError: ``verify`` is none of these.

    Errors of a load are in ``failures`` of torch's ``CheckpointException``, by rank:
    :class:`deepnvme.errors.ChecksumError` if the bytes are not those that were saved, and
    :class:`deepnvme.errors.UnsafeFileError` if a non-tensor value asks for code. Classes that
    ``torch.serialization.add_safe_globals`` allows are loaded, as in ``deepnvme.load``.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
        >>> state = {"weight": torch.ones(2, 3)}
        >>> saved = dcp.save(state, storage_writer=DeepnvmeWriter("step_100"))
        >>> target = {"weight": torch.zeros(2, 3)}
        >>> dcp.load(target, storage_reader=DeepnvmeReader("step_100", verify="full"))
        >>> target["weight"].equal(state["weight"])
        True
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        engine: Engine | None = None,
        verify: Literal["auto", "off", "sample", "full"] = "auto",
    ) -> None:
        super().__init__()
        if verify not in ("auto", "off", "sample", "full"):
            msg = f"verify is {verify!r}; it must be 'auto', 'off', 'sample' or 'full'"
            raise InvalidArgumentError(msg)
        self._folder = CheckpointFolder(path, "DeepnvmeReader", "dcp.load")
        self._engine = engine
        self._verify = verify
        self._locations: dict[MetadataIndex, ItemLocation] = {}
        self._entries: dict[str, Any] = {}
        self._fingerprints: dict[str, tuple[int, int]] = {}
        self._text = ""
        self._own_keys: OwnKeys | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the next load."""
        self._folder.replace(checkpoint_id)
        self._locations, self._fingerprints = {}, {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read ``deepnvme.json``."""
        try:
            return self._read_metadata()
        except Exception as error:
            if not _is_called_by_load():
                raise
            return _UnreadableMetadata(error)

    @gc_paused
    def _read_metadata(self) -> Metadata:
        path = self._folder.path / INDEX_NAME
        text = self._text = read_metadata(path)
        state = _list_state(text.encode())
        if self._verify != "off" and state == "damaged":
            msg = (
                f"{path}: the checksum of this index does not match, so it is not the one that was saved; restore it "
                "from a copy, or use verify='off'"
            )
            raise ChecksumError(msg)
        try:
            encoded = json.loads(text)
            metadata = decode(encoded)
            if state == "sealed":
                self._fingerprints = decode_fingerprints(encoded)
        except MemoryError as error:
            raise OutOfMemoryError(f"{path}: there is not enough memory for its contents") from error
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if is_of_handler(error):
                raise
            msg = f"{path}: this is not a checkpoint of deepnvme.integrations.dcp ({error})"
            raise CorruptFileError(msg) from error
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Store where everything is."""
        del is_coordinator
        self._locations = metadata.storage_data
        self._entries = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items: where possible in one batch and straight into its tensors, the others in groups."""
        try:
            self._read(plan, planner)
        except (FileNotFoundError, CorruptFileError, ChecksumError) as error:
            # A save has put other files into the place of those that the index listed.
            if self._is_replaced():
                msg = f"{self._folder.path}: the checkpoint was replaced while it was read; load it again"
                raise Error(msg) from error
            raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _is_replaced(self) -> bool:
        """Whether the folder has another index now."""
        try:
            return read_metadata(self._folder.path / INDEX_NAME) != self._text
        except Error:
            return False

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        shards, finishes, buffered = self._request_all(plan, planner)
        self._transfer(shards)
        for finish in finishes:
            finish()
        for group in request_groups(buffered):
            self._transfer({one.shard: None for one, _ in group})
            for one, piece in group:
                one.finish(piece)
        for one in buffered:
            planner.commit_tensor(one.item, one.target)

    @gc_paused
    def _request_all(
        self, plan: LoadPlan, planner: LoadPlanner
    ) -> tuple[list[Shard], list[Callable[[], None]], list[BufferedItem]]:
        """Request all items from their shards. Returns the shards, the work to do then, and items to request later."""
        by_file: dict[str, list[ReadItem]] = {}
        wanted = getattr(planner, "state_dict", {})
        state = getattr(planner, "original_state_dict", None)
        self._own_keys = OwnKeys(state) if isinstance(state, Mapping) else None
        for item in plan.items:
            self._check_kind(item, wanted)
            by_file.setdefault(self._locations[item.storage_index].file, []).append(item)
        overlaps = TargetOverlaps()
        shards: list[Shard] = []
        finishes: list[Callable[[], None]] = []
        buffered: list[BufferedItem] = []
        for name, items in by_file.items():
            shard = Shard(self._folder.path / name, self._engine, self._verify, self._fingerprints.get(name))
            shards.append(shard)
            for item in items:
                requested = self._request(shard, item, planner, overlaps)
                if isinstance(requested, BufferedItem):
                    buffered.append(requested)
                else:
                    finishes.append(requested)
        overlaps.check(str(self._folder.path))
        return shards, finishes, buffered

    def _transfer(self, shards: Iterable[Shard]) -> None:
        """Read all that was requested, and compare it with the checksums."""
        for shard in shards:
            shard.start()
        engine = default_engine() if self._engine is None else self._engine
        engine.read_batch([part for shard in shards for part in shard.parts])
        for shard in shards:
            shard.finish()

    def _check_kind(self, item: ReadItem, wanted: Any) -> None:
        """Reject a non-tensor item for a tensor of the state: a damaged index may claim one."""
        name = item.dest_index.fqn
        if item.type != LoadItemType.BYTE_IO or not isinstance(wanted, Mapping):
            return
        value = wanted.get(name)
        if isinstance(value, torch.Tensor | ShardedTensor) or hasattr(value, "__create_chunk_list__"):
            index = self._folder.path / INDEX_NAME
            msg = f"{index}: {name!r} is not listed as a tensor, but the state has a tensor there"
            raise CorruptFileError(msg)

    def _request(
        self, shard: Shard, item: ReadItem, planner: LoadPlanner, overlaps: TargetOverlaps
    ) -> Callable[[], None] | BufferedItem:
        """Request an item from a shard, and return what to do once its bytes are there; or an item to request later."""
        name = self._locations[item.storage_index].tensor
        dtype, shape = shard.dtype_and_shape(name)
        if item.type == LoadItemType.BYTE_IO:
            return self._request_object(shard, item, planner)
        target = planner.resolve_tensor(item).detach()
        starts, lengths = list(item.storage_offsets), list(item.lengths)
        expected = self._entries[item.storage_index.fqn].properties.dtype
        if dtype == torch.uint8 and shape[-1:] == [expected.itemsize] and len(shape) == len(lengths) + 1:
            # A dtype that safetensors lacks was saved as bytes.
            dtype, shape = expected, shape[:-1]
        if dtype != expected or len(shape) != len(lengths):
            shard.raise_mismatch(name, f"is {dtype} of {shape}, and deepnvme.json lists another dtype or size")
        if any(start + length > size for start, length, size in zip(starts, lengths, shape, strict=True)):
            shard.raise_mismatch(name, f"has the shape {shape}, which is smaller than deepnvme.json says")
        _check_cast(f"{shard.path}: {name}", dtype, target.dtype)
        is_plain = target.device.type == "cpu" and target.dtype == dtype and not (target.is_conj() or target.is_neg())
        earlier = overlaps.add(item.dest_index.fqn, target, item) if target.numel() else None
        if lengths[1:] == list(shape[1:]) and is_plain and earlier is None:
            # Rows are contiguous in the file.
            start = starts[0] * math.prod(shape[1:]) * dtype.itemsize if shape else 0
            shard.request(name, start, target)
            return lambda: planner.commit_tensor(item, target)
        return BufferedItem(shard, name, item, target, dtype, shape, is_tied=earlier is not None)

    def _request_object(self, shard: Shard, item: ReadItem, planner: LoadPlanner) -> Callable[[], None]:
        name = self._locations[item.storage_index].tensor
        dtype, shape = shard.dtype_and_shape(name)
        if dtype != torch.uint8 or len(shape) != 1:
            shard.raise_mismatch(name, f"is {dtype} of {shape}, and deepnvme.json lists it as a non-tensor value")
        buffer = bytearray(shape[0])
        if buffer:
            shard.request(name, 0, torch.frombuffer(buffer, dtype=torch.uint8))

        def load() -> None:
            self._load_object(item, planner, repickle_safely(buffer, shard.path, name, self._engine))

        return load

    def _load_object(self, item: ReadItem, planner: LoadPlanner, value: io.BytesIO) -> None:
        """Give a value to the planner. If torch would set it under another key than the state has, set it here."""
        path = getattr(planner, "mappings", {}).get(item.dest_index.fqn)
        if self._own_keys is None or path is None or (own := self._own_keys.path(path)) == path:
            planner.load_bytes(item, value)
            return
        state = getattr(planner, "original_state_dict")  # noqa: B009 (other planners have none)
        scratch: dict[Any, Any] = {}
        try:
            setattr(planner, "original_state_dict", scratch)  # noqa: B010
            planner.load_bytes(item, value)
        finally:
            setattr(planner, "original_state_dict", state)  # noqa: B010
        self._own_keys.set(own, element(scratch, path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be a folder: any path except a URL."""
        return "://" not in os.fspath(checkpoint_id)


class MissingNamesPlanner(DefaultLoadPlanner):
    """Names all tensors and values that the checkpoint lacks, and some that it has.

    Args:
        checkpoint: the checkpoint, for errors.
    """

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def create_local_plan(self) -> LoadPlan:
        """Make the plan of this rank.

        Raises:
            KeyError: the checkpoint has no tensor or value of a name.
        """
        try:
            return super().create_local_plan()
        except RuntimeError as error:
            found = self.metadata.state_dict_metadata if self.metadata else {}
            missing = [name for name in self.state_dict if name not in found]
            if not missing:
                raise
            others = [name for name in found if name not in self.state_dict] or list(found)
            has = f"no entry is named {names_text(sorted(missing))}; its entries are: {names_text(sorted(others))}"
            msg = f"{self._checkpoint}: {has}"
            raise KeyError(msg) from error


class _UnreadableMetadata(Metadata):
    """Raises, as soon as it is used, the error that kept the metadata from being read.

    ``dcp.load`` prints an error of ``read_metadata``, and raises an ``AssertionError`` in its place. It reports errors
    of the planner and of ``set_up_storage_reader``, which use the metadata next, as they are.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name in Metadata.__dataclass_fields__:
            raise self._error
        return super().__getattribute__(name)


def _is_called_by_load() -> bool:
    """Whether torch's load has called the caller of this function."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_loader"  # noqa: SLF001


def _check_cast(what: str, stored: torch.dtype, target: torch.dtype) -> None:
    if refusal := cast_refusal(stored, target):
        msg = f"{what} is {stored} in the checkpoint, and {target} in the state to load into"
        raise InvalidArgumentError(f"{msg}, {refusal}; load into a tensor of {stored}")
