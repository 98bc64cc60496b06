"""Load all files of a path: find, open, read, verify, and build the objects."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from deepnvme._deepnvme import StripeSet, _CheckpointReader, _find_set
from deepnvme._utils.gc_pause import GcPause, gc_paused
from deepnvme._utils.memory import memory_errors_with_path
from deepnvme._utils.public import names_text, warn_caller
from deepnvme.errors import ChecksumError, CorruptFileError, Error, MovedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeVar

    import torch

    from deepnvme._checkpoint.load_memory import LoadBuffers
    from deepnvme._deepnvme import Engine

    _Result = TypeVar("_Result")
    _Report: TypeAlias = Callable[[int, int], object] | None
    _RestoreLocation: TypeAlias = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]

    _HeaderUse: TypeAlias = Literal["trust", "read", "read_unless_verified"]

SourcePath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | StripeSet
# Times that a set of files may be replaced during one load.
_REPLACEMENTS_MAX = 100


@dataclass(kw_only=True)
class LoadRequest:
    """A load, with its checked arguments."""

    path: SourcePath
    device: torch.device
    only: list[str] | None = None
    verify: str
    engine: Engine | None = None
    report: _Report = None
    pin_memory: bool = False
    restore_location: _RestoreLocation | None = None
    """Chooses the device of each storage, by the location that it was saved with. Default: all go to ``device``."""

    @property
    def name(self) -> str:
        """The path, for error messages."""
        return os.fsdecode(self.path) if isinstance(self.path, bytes) else str(self.path)

    def for_files(self, work: Callable[[list[SourceFile]], _Result]) -> _Result:
        """Run ``work`` on the files of the path. If they are replaced meanwhile, run it again on the new ones."""
        return for_files(self.path, self.verify, work)

    def open(self, file: SourceFile, *, headers: _HeaderUse = "trust") -> _CheckpointReader:
        """Open one of the files.

        Args:
            file: the file.
            headers: how to find the data of an archive's records, whose headers state where it begins. ``"trust"``:
                reads assume that the headers are as expected, and raise ``MovedError`` otherwise. ``"read"``: read all
                headers now, so that no read raises ``MovedError``. ``"read_unless_verified"``: like ``"trust"`` if the
                file's checksums cover the headers, since reads compare them then; otherwise like ``"read"``.

        Raises:
            OSError: the file cannot be opened or read.
            CorruptFileError: the file is damaged, is no checkpoint, or lacks a tensor that its index lists.
            ChecksumError: its index differs from the checksum, or it is another file than its index refers to.
            UnsupportedError: it is a packed model.
        """
        exact = headers != "trust"
        unless_covered = headers == "read_unless_verified" and self.verify != "off"
        reader = _CheckpointReader(
            file.path, self.engine, exact, file.names, unless_covered=unless_covered, complete=self.verify == "full"
        )
        if self.verify != "off":
            reader.check(file.fingerprint)
        reader.refuse_packed()
        if reader.coverage == "stale":
            msg = f"{file.path}: its checksums were made for another file and copied into this one; they are ignored"
            warn_caller(msg)
        return reader

    def load(self) -> Any:
        """Load all files. The tensors of several files are merged into one dict."""
        with memory_errors_with_path(self.name):
            return self.for_files(self._load_files)

    def _load_files(self, files: list[SourceFile]) -> Any:
        if len(files) == 1 and files[0].names is None:
            return self._load_file(files[0])
        self.check_only(files)
        whole: dict[str, Any] = {}
        for file in files:
            whole.update(self._load_file(file))
        return whole

    def check_only(self, files: list[SourceFile]) -> None:
        """Before reading anything, raise ``KeyError`` if a pattern of ``only`` matches no tensor."""
        self.select([name for file in files for name in file.names or ()], None)

    def _load_file(self, file: SourceFile) -> Any:
        reader = self.open(file)
        try:
            return self._read(reader, file.path, file.names)
        except MovedError:
            # Another program placed the records differently than the directory suggests. Read again below: in this
            # block, the error would keep the memory of the first read.
            del reader
        return self._read(self.open(file, headers="read"), file.path, file.names)

    def _read(self, reader: _CheckpointReader, path: Any, names: list[str] | None) -> Any:
        if self.only is None and names is None:
            # Everything: start reading before looking at names.
            buffers = self._start(reader, list(range(reader.storage_count)))
            if reader.format == "safetensors":
                return self._build_safetensors(tensor_entries(reader), buffers)
            return self._build_archive(reader, path, list(range(reader.storage_count)), buffers, None)
        tensors = tensor_entries(reader)
        chosen = set(self.select([entry.name for entry in tensors], names))
        chosen_entries = [entry for entry in tensors if entry.name in chosen]
        wanted = sorted({entry.storage for entry in chosen_entries})
        buffers = self._start(reader, wanted)
        if reader.format == "safetensors":
            return self._build_safetensors(chosen_entries, buffers)
        return self._build_archive(reader, path, wanted, buffers, list(chosen))

    def _start(self, reader: _CheckpointReader, wanted: list[int]) -> LoadBuffers | None:
        """Start to read storages. The meta device needs no bytes."""
        from deepnvme._checkpoint.load_memory import LoadBuffers  # noqa: PLC0415

        return (
            None if self.device.type == "meta" else LoadBuffers(reader, wanted, self.device, pin_memory=self.pin_memory)
        )

    def select(self, available: list[str], names: list[str] | None) -> list[str]:
        """Return the names of the tensors to load from a file: those in ``names``, or all.

        If these are all tensors of the state, each pattern of ``only`` must match one of them.
        """
        from deepnvme._checkpoint.nested_states import NamePatterns  # noqa: PLC0415

        listed = available if names is None else [*filter(set(names).__contains__, available)]
        if self.only is None:
            return listed
        patterns = NamePatterns(self.only)
        chosen = [*filter(patterns.matches, listed)]
        if names is None and (patterns.unmatched or not chosen):
            msg = f"{self.name}: no tensor matches {patterns.unmatched}; its tensors are: {names_text(available)}"
            raise KeyError(msg)
        return chosen

    def _build_safetensors(self, tensors: list[TensorEntry], buffers: LoadBuffers | None) -> dict[str, torch.Tensor]:
        import torch  # noqa: PLC0415

        if buffers is None:
            return {
                entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
                for entry in tensors
            }
        with GcPause():
            state = {
                entry.name: buffers.flat(entry.storage, getattr(torch, entry.dtype)).view(entry.shape)
                for entry in tensors
            }
        buffers.finish(self.verify, self.report)
        if self.restore_location is not None:
            return {name: _restored(tensor, self.restore_location) for name, tensor in state.items()}
        if self.device.type != "cpu":
            # On devices that the engine reaches, the tensors are there already, and this copies nothing.
            state = {name: tensor.to(self.device) for name, tensor in state.items()}
        return state

    def build_on_meta(self, reader: _CheckpointReader, path: Any) -> Any:
        """Build the state of an archive with tensors on the meta device, for its other values."""
        return self._build_archive(reader, path, list(range(reader.storage_count)), None, None)

    def _build_archive(
        self,
        reader: _CheckpointReader,
        path: Any,
        wanted: list[int],
        buffers: LoadBuffers | None,
        chosen: list[str] | None,
    ) -> Any:
        import torch  # noqa: PLC0415

        from deepnvme._checkpoint.safe_unpickler import SafeUnpickler, errors_with_path  # noqa: PLC0415
        from deepnvme._checkpoint.size_limits import SizeLimits  # noqa: PLC0415
        from deepnvme._utils.devices import engine_reaches  # noqa: PLC0415

        storages: list[torch.UntypedStorage | None] = [None] * reader.storage_count
        unpickler = SafeUnpickler(path, SizeLimits(path, reader))
        if buffers is None:
            sizes = [entry.nbytes for entry in storage_entries(reader)]
            for index in wanted:
                storages[index] = torch.empty(sizes[index], dtype=torch.uint8, device="meta").untyped_storage()
            with errors_with_path(path):
                return reader.build(unpickler, storages, chosen)
        builds_early = engine_reaches(self.device) and reader.is_plain and self.restore_location is None
        if not builds_early:
            buffers.finish(self.verify, self.report)
        with GcPause():
            for index in wanted:
                storages[index] = buffers.storage(index, self.device)
        if self.restore_location is not None:
            locations = [entry.location for entry in storage_entries(reader)]
            storages = [
                None if storage is None else self.restore_location(storage, location)
                for storage, location in zip(storages, locations, strict=True)
            ]
        # If `builds_early`, the other objects are built while the tensors' bytes arrive.
        with errors_with_path(path), GcPause():
            state = reader.build(unpickler, storages, chosen)
        if builds_early:
            buffers.finish(self.verify, self.report)
        return state


def _restored(tensor: torch.Tensor, restore_location: _RestoreLocation) -> torch.Tensor:
    """Move a tensor of a file that records no devices."""
    import torch  # noqa: PLC0415

    storage = restore_location(tensor.untyped_storage(), "cpu")
    moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


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
