"""Checkpoints of sharded states: folders, written and read through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.checkpoint import SHARDS_LIST
from deepnvme._checkpoint.dcp.reader import DeepnvmeReader, MissingNamesPlanner
from deepnvme._checkpoint.dcp.writer import ComparingPlanner, DeepnvmeWriter
from deepnvme._checkpoint.distributed.process_group import run_interruptibly
from deepnvme._checkpoint.nested_states import empty_containers, named_tensors, refuse_lost
from deepnvme._checkpoint.pickler import warn_of_refused_values
from deepnvme._checkpoint.save import SaveOptions
from deepnvme._deepnvme import _crc64, _NewFolder
from deepnvme._utils.interrupts import SignalSafeEvent, is_of_handler
from deepnvme._utils.public import warn_caller
from deepnvme._utils.tensors import find_copy
from deepnvme.errors import CancelledError, Error, InvalidArgumentError, PeerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from deepnvme._checkpoint.background_save import SaveResult
    from deepnvme._checkpoint.checkpoint import Checkpoint, Part
    from deepnvme._checkpoint.distributed.process_group import RankGroup
    from deepnvme._deepnvme import _Saving


def start(group: RankGroup, path: Path, state: object, options: Callable[[], SaveOptions]) -> ShardedSave:
    """Start a save: create its folder, before anything is written."""
    saving = ShardedSave(group, path)
    name = group.run_on_all(lambda: saving.make(state, options()))[0]
    saving.temporary = path.with_name(name)
    return saving


class ShardedSave:
    """A running save of a sharded state, on all ranks."""

    def __init__(self, group: RankGroup, path: Path) -> None:
        self.path = path
        self.parts: tuple[Part, ...] = ()
        self.pending: dict[str, str] = {}
        self.temporary = path
        self.progress = (0, 0)
        self._group = group
        self._options = SaveOptions()
        self._state: Any = None
        self._new: _NewFolder | None = None
        self._filled = SignalSafeEvent()
        self._is_stopped = False

    def make(self, state: object, options: SaveOptions) -> str:
        """Copy the containers of the state, and create the private folder on the leader. Returns its name there."""
        from torch.distributed.checkpoint.stateful import Stateful  # noqa: PLC0415

        if not isinstance(state, Mapping):
            msg = f"a state with DTensors is saved as a dict, not as {type(state).__name__}"
            raise TypeError(msg)
        # Objects with a `state_dict` method. torch would call it in its own save, where an error of one rank is no
        # error of the others, and after changes to the object.
        state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
        self._state, self._options = _containers(state), options
        warn_of_refused_values(self._state)
        if not self._group.is_leader:
            return ""
        self._new = _NewFolder(self.path.parent, self.path.name)
        return self._new.path.name

    def wait_filled(self) -> None:
        """Wait until the tensors may change."""
        # Ctrl-C would not interrupt a wait without a timeout.
        while not self._filled.wait(0.05):
            pass

    def stop(self) -> None:
        """Make the save end without a checkpoint, on all ranks."""
        self._is_stopped = True

    def discard(self) -> None:
        """Remove the folder."""
        if self._new is not None:
            self._new.discard()

    def keep(self) -> None:
        """Keep the folder: a manifest lists it."""
        if self._new is not None:
            self._new.keep()

    def wait(self, progress: Any, stop_on_signal: bool) -> SaveResult:
        """Write the folder with the other ranks. Afterwards it has a private name."""
        del progress, stop_on_signal
        with self._group.leave_on_error():
            try:
                self._group.run_on_all(self._write)
                saved = self._group.run_on_all(self._measure)[0]
            except BaseException:
                self.discard()
                raise
            finally:
                self._filled.set()
                self._state = None
        assert saved is not None
        self.pending = {self.path.name: self.temporary.name}
        return saved

    def _write(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

        writer = _NotifyingWriter(self.temporary, self._options, self._filled)
        planner = ComparingPlanner(self._group.name)
        options = {"storage_writer": writer, "planner": planner}
        try:
            with _errors_with_path(self.path):
                _with_all(self._group, lambda: save(self._state, **options, **_group_of(self._group)))
        finally:
            writer.give_up()
        if self._is_stopped:
            msg = f"{self.path}: the save was stopped"
            raise CancelledError(msg)

    def _measure(self) -> SaveResult | None:
        if not self._group.is_leader:
            return None
        index = self.temporary / SHARDS_LIST
        index_nbytes = index.stat().st_size
        nbytes = sum(path.stat().st_size for path in self.temporary.iterdir())
        return nbytes, 0, index_nbytes, _crc64(index, 0, index_nbytes)


class _NotifyingWriter(DeepnvmeWriter):
    """Sets ``filled`` once this rank's tensors are copied or on disk."""

    # The save has warned where it was called.
    _warns = False

    def __init__(self, path: Path, options: SaveOptions, filled: SignalSafeEvent) -> None:
        super().__init__(path)
        self._options = options
        self._filled = filled

    def _finish_shard(self, saving: _Saving) -> None:
        saving.wait_filled()
        self._filled.set()
        saving.wait(None, False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors."""
        try:
            return super().write_data(plan, planner)
        finally:
            self._filled.set()


def restore(group: RankGroup, found: Checkpoint, options: dict[str, Any]) -> Any:
    """Fill the state ``into`` from a sharded checkpoint. Each rank reads its own part of each tensor."""
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    into = options.get("into")
    readers: list[DeepnvmeReader] = []

    def check() -> str:
        # All that can fail on one rank alone, before torch's collectives.
        found.check()
        if not {"engine", "into"} <= set(options) <= {"engine", "into", "verify"}:
            msg = (
                f"{found.path} is sharded: each process saved its parts of the tensors. Call restore(into=state) with "
                "the sharded state of this process; the only other options are engine and verify"
            )
            raise InvalidArgumentError(msg)
        if not isinstance(into, Mapping):
            msg = f"{found.path}: into is {type(into).__name__}; a sharded checkpoint fills a dict"
            raise TypeError(msg)
        rest = {name: value for name, value in options.items() if name != "into"}
        readers.append(DeepnvmeReader(found.path, **rest))
        if empty := empty_containers(into):
            refuse_lost(str(found.path), empty, [], readers[0].read_metadata().state_dict_metadata)
        return found.path.name

    def fill() -> None:
        planner = MissingNamesPlanner(str(found.path))
        with _errors_with_path(found.path):
            _with_all(group, lambda: load(into, storage_reader=readers[0], planner=planner, **_group_of(group)))

    with group.leave_on_error():
        names = group.run_on_all(check)
        for rank, name in enumerate(names):
            if name != names[0]:
                text = f"{group.name(rank)} restores {name}, and {group.name(0)} {names[0]}"
                group.raise_on_all(f"{found.path.parent}: {text}; restore the same step everywhere")
        group.run_on_all(fill)
    if copied := find_copy(dict(named_tensors(into))):
        name, remedy = copied
        warn_caller(f"{found.path}: {name} of into is a copy; call {remedy} with it to load it")
    return into


def _group_of(group: RankGroup) -> dict[str, Any]:
    group.check_open()
    return {"process_group": group.torch_group, "no_dist": group.torch_group is None}


def _with_all(group: RankGroup, work: Callable[[], object]) -> None:
    """Run work that uses torch's own collectives, and translate its errors."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    try:
        with warnings.catch_warnings():
            # torch warns if there is only one process.
            warnings.filterwarnings("ignore", message=".*single process")
            run_interruptibly(work)
    except CheckpointException as error:
        # All ranks raise it, and exchange their errors next. It is no subclass of Exception.
        failures = error.failures
        own = failures.get(group.rank)
        if own is not None and isinstance(own[0], Exception):
            raise own[0] from None
        rank, (failure, _) = next(iter(failures.items()))
        msg = f"{group.name(rank)} failed, so all ranks fail: {type(failure).__name__}: {failure}"
        raise PeerError(msg) from None
    except RuntimeError as error:
        if group.is_single:
            raise
        group.raise_lost(error)
    except BaseException as error:
        # The others are in torch's collectives, or on their way. An exchange of ours would mix with those.
        group.leave(f"{type(error).__name__}: {error}", error)
        raise


@contextmanager
def _errors_with_path(path: Path) -> Iterator[None]:
    """Name the checkpoint in errors of torch's planner, which are about the state."""
    try:
        yield
    except (AssertionError, TypeError, ValueError) as error:
        if isinstance(error, Error) or is_of_handler(error):
            raise
        what = str(error) or type(error).__name__
        msg = f"{path}: the states of the ranks do not match each other, or not the checkpoint: {what}"
        raise InvalidArgumentError(msg) from error


def _containers(state: Any) -> Any:
    """Copy dicts, lists and tuples, so that later changes to them are not saved. Refuse sparse tensors and odd keys."""
    if isinstance(state, Mapping):
        for key in state:
            if not isinstance(key, str | int):
                msg = f"{key!r} is a key of the state; the keys of a state with DTensors are str and whole numbers"
                raise InvalidArgumentError(msg)
        return {key: _containers(value) for key, value in state.items()}
    if getattr(state, "is_sparse", False) or getattr(state, "is_sparse_csr", False):
        msg = f"a sparse tensor of shape {tuple(state.shape)} in a state with DTensors: save tensor.to_dense()"
        raise InvalidArgumentError(msg)
    if type(state) in (list, tuple):
        return type(state)(_containers(value) for value in state)
    return state
