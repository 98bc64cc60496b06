"""One checkpoint that several processes write: byte ranges of one file, or one part file each.

```text
all        serialise the state, compare, plan
leader     makes the file; with parts, each writer makes its own
writers    write their range, except what needs checksums of others
all        exchange checksums
writers    write the rest, and sync; the leader lists the parts
leader     replaces the manifest, with the private names of all files  (history)
all        give the files their names
```

After each line, all ranks know whether it succeeded everywhere. If not, all raise the error and remove their files.
Files that the manifest lists are not removed: the next process that opens the folder gives them their names.

Each rank writes a byte range of the file out of its own memory, so names and sizes must agree. They are compared. The
leader provides non-tensor values, which are in its pickle, and small tensors. Both commonly differ between ranks, as
random-number states and batch statistics do, and a small tensor has a single checksum (see `_SMALL_BYTES`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch

from deepnvme._checkpoint.checkpoint import HEAD_BYTES, PARTS_LIST, Part
from deepnvme._checkpoint.nested_states import has_dtensors, named_tensors
from deepnvme._checkpoint.pickler import pickle_with_storages
from deepnvme._checkpoint.save import NamedTensor, SaveOptions, checked_tensors, plan_archive, plan_safetensors
from deepnvme._deepnvme import StripeSet, _crc64, _NewFile, _shard_ranges
from deepnvme._utils.tensors import contiguous_exactly
from deepnvme.errors import CancelledError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deepnvme._checkpoint.background_save import SaveResult
    from deepnvme._checkpoint.distributed.process_group import RankGroup
    from deepnvme._checkpoint.history import History
    from deepnvme._deepnvme import _SavePlan, _SaveShard

# The stripe size of a stripe set is a multiple of this.
_BLOCK_BYTES = 4096
# A tensor below this size has a single checksum, which two ranks with a half each could not compute. `LARGE_BYTES` in
# deepnvme-format is the same limit.
_SMALL_BYTES = 256 << 10

# A tensor's name, and everything about it except its elements.
_Description = tuple[str, str]


def agree_on_state(  # noqa: PLR0917
    group: RankGroup,
    history: History,
    step: int,
    obj: object,
    suffix: str,
    writers: Writers,
    ready: Callable[[], None],
) -> tuple[SerialisedState | None, Path]:
    """Serialise the state once the previous save is over, and check that all ranks save the same.

    Returns the state, or ``None`` if it is sharded, and the path of the checkpoint.
    """
    state: SerialisedState | None = None

    def read_state() -> tuple[int, str, tuple[str, str, list[str]]]:
        nonlocal state
        ready()
        if not has_dtensors(obj):
            state = serialise(obj, suffix == ".pt")
        return step, "sharded" if state is None else state.digest, history.prepare_shared(step)

    wanted = group.run_on_all(read_state)
    leaders_step, expected, _ = wanted[0]
    for rank, (other_step, _, _) in enumerate(wanted):
        if other_step != leaders_step:
            text = f"{group.name(rank)} saves step {other_step}, and {group.name(0)} step {leaders_step}"
            group.raise_on_all(f"{history.folder}: {text}; all ranks must save the same step")
    kinds = {found == "sharded" for _, found, _ in wanted}
    if len(kinds) > 1:
        group.raise_on_all(
            f"{history.folder}: the state has DTensors on some ranks and none on others; use the same kind on all"
        )
    if state is not None and any(found != expected for _, found, _ in wanted):
        raise_different(group, f"{history.folder}, step {step}", state)
    ending = "" if state is None else writers.suffix(suffix)
    name = history.reserve_shared([begun for _, _, begun in wanted], step, ending)
    return state, history.folder / name


def start(
    group: RankGroup, path: Path, state: SerialisedState, writers: Writers, options: Callable[[], SaveOptions]
) -> SharedSave:
    """Plan a file and create it, before any byte is written."""
    state.take_from_leader(group)
    saving = SharedSave(group, path, writers)
    try:
        made = group.run_on_all(lambda: saving.make(state, options()))
        others = [str(rank) for rank, (layout_crc64, _) in enumerate(made) if layout_crc64 != made[0][0]]
        if others:
            text = f"ranks {', '.join(others)} plan another file than rank 0; all need the same version and settings"
            group.raise_on_all(f"{path}: {text}")
    except BaseException:
        saving.discard()
        raise
    saving.temporary_name = made[0][1]
    return saving


class _Finished(NamedTuple):
    """The files of one rank, ready for their final names."""

    new: str
    """The private name of its file, or of the shared one; empty without one."""
    listed: str
    """The private name of the list of parts; empty except on the leader."""
    head_crc64: str | None
    """The checksum of a part's first bytes."""
    written_ns: int | None
    """The modification time of a part, in nanoseconds since 1970."""


class SharedSave:
    """A running save of all ranks."""

    def __init__(self, group: RankGroup, path: Path, writers: Writers) -> None:
        self.path = path
        self.parts: tuple[Part, ...] = ()
        self.pending: dict[str, str] = {}
        self.temporary_name = ""
        self._group = group
        self._writers = writers
        self._options = SaveOptions()
        self._plan: _SavePlan | None = None
        self._shard_ranges: list[tuple[int, int]] = []
        # Of this rank, if it writes.
        self._number: int | None = None
        self._new: _NewFile | None = None
        self._list: _NewFile | None = None
        self._shard: _SaveShard | None = None
        self._is_stopped = False

    def make(self, state: SerialisedState, options: SaveOptions) -> tuple[int, str]:
        """Plan the file, and create this rank's files. Returns its ``layout_crc64`` and the private file name."""
        self._options = options
        plan = self._plan = state.plan(self.path.with_name(self._file_name), self._options)
        self._shard_ranges = _shard_ranges(plan.nbytes, len(self._writers.ranks))
        writers = self._writers.ranks[: len(self._shard_ranges)]
        self._number = writers.index(self._group.rank) if self._group.rank in writers else None
        if self._writers.layout == "parts":
            if self._number is not None:
                start, stop = self._shard_ranges[self._number]
                self._new = _NewFile(self._part_path(self._number), stop - start, self._options.engine)
        elif self._group.is_leader:
            self._new = _NewFile(self.path, plan.nbytes, self._options.engine)
        return plan.layout_crc64, "" if self._new is None else self._new.temporary.name

    @property
    def _file_name(self) -> str:
        """The name of the single file, or of the file that the parts form together."""
        return self.path.name.removesuffix(PARTS_LIST)

    def _part_path(self, number: int) -> Path:
        parts = f"{len(self._shard_ranges):02}"
        # Of equal length, so that a shell lists the parts in order.
        return self.path.with_name(f"{self._file_name}.part-{number:0{len(parts)}}-of-{parts}")

    @property
    def _planned(self) -> _SavePlan:
        assert self._plan is not None
        return self._plan

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of this rank's shard that are written, and in total."""
        return self._planned.progress

    def wait_filled(self) -> None:
        """Wait until the tensors may change."""
        self._planned.wait_filled()

    def stop(self) -> None:
        """Make the save end soon, on all ranks."""
        self._is_stopped = True
        self._planned.stop()

    def discard(self) -> None:
        """Remove the files."""
        for new in (self._new, self._list):
            if new is not None:
                new.discard()
        if self._plan is not None:
            self._plan.release_tensors()

    def keep(self) -> None:
        """Keep the files: a manifest lists them."""
        for new in (self._new, self._list):
            if new is not None:
                new.keep()

    def wait(self, progress: Any, stop_on_signal: bool) -> SaveResult:
        """Write the file with the other ranks. Afterwards it has a private name."""
        del progress, stop_on_signal
        with self._group.leave_on_error():
            try:
                checksums = self._group.run_on_all(self._write)
                saved = self._group.run_on_all(lambda: self._finish(checksums))[0]
                assert saved is not None
                self._record_files(self._group.run_on_all(self._finish_files))
            except BaseException:
                self.discard()
                raise
            finally:
                # A shard that was not finished still holds the tensors.
                self._shard = None
                self._planned.release_tensors()
        return saved

    def _write(self) -> bytes | None:
        if self._number is None:
            # This rank's tensors are not written.
            self._planned.release_tensors()
            return None
        start, stop = self._shard_ranges[self._number]
        if self._new is not None:
            path, base = self._new.temporary, start if self._writers.layout == "parts" else 0
        else:
            path, base = self.path.with_name(self.temporary_name), 0
        try:
            self._shard = self._planned.start_shard(path, start, stop, base)
        except FileNotFoundError as error:
            text = f"{self._group.name(self._group.rank)} does not see {path}, which {self._group.name(0)} made"
            msg = f"{text}; use a folder that all processes share, or layout='parts'"
            raise NotFoundError(msg) from error
        return self._shard.checksums()

    def _finish(self, checksums: list[bytes | None]) -> SaveResult | None:
        if self._shard is None:
            return None
        others = [each for rank, each in enumerate(checksums) if rank != self._group.rank and each is not None]
        saved = self._shard.finish(others)
        if self._is_stopped:
            msg = f"{self.path}: the save was stopped"
            raise CancelledError(msg)
        return saved

    def _finish_files(self) -> _Finished:
        """Prepare the files for their final names."""
        head = written_ns = None
        if self._new is not None:
            self._new.take_mode()
            if self._writers.layout == "parts":
                start, stop = self._shard_ranges[self._number or 0]
                head = f"{_crc64(self._new.temporary, 0, min(stop - start, HEAD_BYTES)):016x}"
                written_ns = self._new.temporary.stat().st_mtime_ns
        if self._group.is_leader and self._writers.layout == "parts":
            self._list = self._write_list()
        new, listed = ("" if file is None else file.temporary.name for file in (self._new, self._list))
        return _Finished(new, listed, head, written_ns)

    def _record_files(self, finished: list[_Finished]) -> None:
        """Record the files that all ranks made."""
        if self._writers.layout == "file":
            self.pending = {self.path.name: finished[0].new}
            return
        made = [finished[rank] for rank in self._writers.ranks[: len(self._shard_ranges)]]
        names = self._part_names()
        hosts = [self._group.hosts[rank] for rank in self._writers.ranks]
        self.parts = tuple(
            Part(name, stop - start, host, each.head_crc64, each.written_ns)
            for name, (start, stop), host, each in zip(names, self._shard_ranges, hosts, made, strict=False)
        )
        self.pending = {name: each.new for name, each in zip(names, made, strict=True)}
        self.pending[self.path.name] = finished[0].listed

    def _part_names(self) -> list[str]:
        return [self._part_path(number).name for number in range(len(self._shard_ranges))]

    def _write_list(self) -> _NewFile:
        first = self._shard_ranges[0][1]
        stripe_bytes = max(-(-first // _BLOCK_BYTES), 1) * _BLOCK_BYTES
        text = StripeSet(self._part_names(), stripe_bytes=stripe_bytes)._manifest_text().encode()  # noqa: SLF001
        new = _NewFile(self.path, len(text), self._options.engine)
        with new.temporary.open("r+b") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        new.take_mode()
        return new


@dataclass(frozen=True)
class Writers:
    """The ranks that write, in the order of their byte ranges, into one file or into one file each."""

    layout: Literal["file", "parts"]
    ranks: list[int]

    def suffix(self, suffix: str) -> str:
        """Return the suffix of a checkpoint's name."""
        return suffix + PARTS_LIST if self.layout == "parts" else suffix

    def local_nbytes(self, group: RankGroup, nbytes: int) -> int:
        """Return about how many bytes of a state this process writes."""
        shards = _shard_ranges(nbytes, len(self.ranks))
        is_writer = group.rank in self.ranks[: len(shards)]
        return shards[0][1] if is_writer else 0


def choose_writers(group: RankGroup, layout: Literal["file", "parts"], per_node: int | None) -> Writers:
    """Choose the writers, up to ``per_node`` on each machine."""
    return Writers(layout, writer_ranks(group.hosts, per_node))


def writer_ranks(hosts: list[str], per_node: int | None) -> list[int]:
    """Alternate between machines, so that even a few writers are on many machines."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    chosen = [ranks[:per_node] for ranks in by_host.values()]
    turns = range(max(len(ranks) for ranks in chosen))
    return [ranks[turn] for turn in turns for ranks in chosen if turn < len(ranks)]


@dataclass
class SerialisedState:
    """A state taken apart, from which a file is planned."""

    descriptions: list[_Description]
    pickle: bytes | None = None
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    tensors: list[NamedTensor] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A hash that is equal if the tensors agree in names, sizes and layout."""
        return hashlib.sha256(repr(self.descriptions).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        if self.pickle is None:
            return sum(int(getattr(tensor, "nbytes", 0)) for _, tensor in self.tensors)
        return sum(storage.nbytes() for storage in self.storages)

    def take_from_leader(self, group: RankGroup) -> None:
        """Replace this rank's pickle and small tensors with those of the leader, rank 0."""
        own = [self._small_bytes(index) for index in range(max(len(self.storages), len(self.tensors)))]
        self.pickle, leaders_small = group.broadcast((self.pickle, own))
        if group.is_leader:
            return
        for index, nbytes in enumerate(leaders_small):
            if nbytes is None:
                continue
            flat = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)
            if self.storages:
                self.storages[index] = flat.untyped_storage()
            else:
                name, tensor = self.tensors[index]
                self.tensors[index] = (name, flat.view(tensor.dtype).view(tensor.shape))

    def _small_bytes(self, index: int) -> bytes | None:
        if self.storages:
            storage = self.storages[index]
            nbytes = storage.nbytes()
            if not 0 < nbytes < _SMALL_BYTES:
                return None
            held: Any = storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
        else:
            tensor = self.tensors[index][1]
            nbytes = tensor.nbytes
            if not 0 < nbytes < _SMALL_BYTES:
                return None
            held = contiguous_exactly(tensor.resolve_conj().resolve_neg()).cpu()
        return ctypes.string_at(held.data_ptr(), nbytes)

    def plan(self, path: Path, options: SaveOptions) -> _SavePlan:
        """Plan the file."""
        if self.pickle is None:
            return plan_safetensors(path, self.tensors, options)
        return plan_archive(self.pickle, self.storages, path, options)


def serialise(obj: object, is_archive: bool) -> SerialisedState:
    """Take a state apart."""
    if not is_archive:
        tensors = checked_tensors(obj)
        descriptions = [(name, f"{tensor.dtype} {list(tensor.shape)}") for name, tensor in tensors]
        return SerialisedState(descriptions, tensors=tensors)
    pickle, storages = pickle_with_storages(obj, warns=True)
    descriptions, is_all = _descriptions(obj, storages)
    if not is_all:
        # Tensors inside objects have no name. If the pickles are equal, so is the order of storages.
        descriptions.append(("objects outside of dicts and lists", hashlib.sha256(pickle).hexdigest()[:16]))
    return SerialisedState(descriptions, pickle, list(storages))


def _descriptions(obj: object, storages: list[torch.UntypedStorage]) -> tuple[list[_Description], bool]:
    """Describe all tensors that have names. Returns whether these are all."""
    places = {_storage_key(storage): index for index, storage in enumerate(storages) if storage.nbytes()}
    seen: set[int | None] = set()
    descriptions = []
    for name, tensor in named_tensors(obj):
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            index = places.get(_storage_key(storage))
            seen.add(index)
            view = f"offset {tensor.storage_offset()}, strides {list(tensor.stride())}"
            what += f" ({view}, in storage {index} of {storage.nbytes()} bytes)"
        descriptions.append((name, what))
    return descriptions, seen >= set(places.values())


def _storage_key(storage: torch.UntypedStorage) -> tuple[str, int, int]:
    return str(storage.device), storage.data_ptr(), storage.nbytes()


def raise_different(group: RankGroup, what: str, state: SerialisedState) -> NoReturn:
    """Raise on all ranks that the states differ, and say where."""
    leaders = group.broadcast(state.descriptions)
    own = next((pair for pair in zip_longest(leaders, state.descriptions) if pair[0] != pair[1]), None)
    differing = [(rank, pair) for rank, pair in enumerate(group.all_gather(own)) if pair is not None]
    rank, (expected, found) = differing[0]
    ranks = ", ".join(str(rank) for rank, _ in differing)
    text = _difference(rank, found, expected)
    advice = "all ranks must save the same tensors in the same order"
    who = f"the state of rank {ranks} differs" if len(differing) == 1 else f"the states of ranks {ranks} differ"
    group.raise_on_all(f"{what}: {who} from that of rank 0: {text}; {advice}")


def _difference(rank: int, found: _Description | None, expected: _Description | None) -> str:
    if found is None or expected is None or found[0] != expected[0]:
        # Two different names say all; the rest would hide them.
        return f"rank {rank} has {_shown(found)} where rank 0 has {_shown(expected)}"
    return f"{found[0]!r} is {found[1]} on rank {rank}, and {expected[1]} on rank 0"


def _shown(line: _Description | None) -> str:
    return "nothing more" if line is None else repr(line[0])
