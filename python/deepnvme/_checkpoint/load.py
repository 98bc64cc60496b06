"""``deepnvme.load``: read a state straight into its final memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from deepnvme._deepnvme import StripeSet, _CheckpointReader, _find_set
from deepnvme._utils.arguments import check_choice, check_engine, check_file_path
from deepnvme._utils.public import public
from deepnvme._utils.tensors import refuse_fake_tensors, require_torch
from deepnvme._utils.terminal import Progress, progress_callback
from deepnvme.errors import (
    ChecksumError,
    CorruptFileError,
    Error,
    InvalidArgumentError,
    MovedError,
    OutOfMemoryError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeAlias, TypeVar

    import torch

    from deepnvme._checkpoint.load_buffer import LoadBuffers
    from deepnvme._deepnvme import Engine

    _Files = TypeVar("_Files")
    _Result = TypeVar("_Result")
    _Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | StripeSet
    _Report: TypeAlias = Callable[[int, int], object] | None
    _RestoreLocation: TypeAlias = Callable[[torch.UntypedStorage, str], torch.UntypedStorage] | None
    _MapLocation: TypeAlias = (
        str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    )

# Times that a set of files may be replaced during one load.
_REPLACEMENTS_MAX = 100


class SourceFile(NamedTuple):
    """A file of the state to load."""

    path: Any
    names: list[str] | None = None
    """The tensors that an index lists for this file. ``None``: all."""
    identity: tuple[int, int] | None = None
    """The file that the index means: its size, and the checksum of its own index."""


@public
def load(
    path: _Path,
    *,
    device: str | int | torch.device = "cpu",
    only: str | Iterable[str] | None = None,
    into: Mapping[str, Any] | None = None,
    cast: bool = False,
    lazy: bool = False,
    pin_memory: bool = False,
    verify: Literal["auto", "off", "sample", "full"] = "auto",
    engine: Engine | None = None,
    progress: Progress = None,
    map_location: _MapLocation | None = None,
    weights_only: bool = True,
    mmap: bool = False,
) -> Any:
    """Load a file of ``deepnvme.save``, ``torch.save`` or safetensors.

    Only the requested bytes are read, straight from disk into the memory of the tensors. Peak memory is the state
    itself. No code of the file is ever run: it may contain tensors, containers and the classes that
    ``torch.serialization.add_safe_globals`` allows, as with ``torch.load(weights_only=True)``.

    Args:
        path: a torch archive, a safetensors file, an index of several (``*.index.json``), a folder that contains one
            of these under Hugging Face's names, or a ``StripeSet``. The name passed to ``save(max_shard_bytes=...)``
            means its index. If both a file and an index of that name exist, the file is loaded, unless the index
            states that it replaces that very file.
        device: where the tensors go, as ``str``, index of a GPU, or ``torch.device``. Default: host memory, whatever
            device they were saved from. ``"meta"`` reads no tensor.
        only: names of tensors, or patterns of names (``"layers.0"`` with all below it, ``"*.weight"``). Each must match
            a tensor. Entries of dicts that none of them matches are omitted. Default: everything.
        into: a state whose tensors are filled in place, by name (a state dict, or one nested as the file is). It is
            returned. Each of its tensors must be in the file, with the same shape. Names, shapes and dtypes are checked
            before any tensor changes. If the read fails, tensors may be partly filled.
        cast: allow other dtypes in ``into`` than in the file. Default False.
        lazy: return tensors that are read on first use. Objects other than tensors and parameters (sparse, quantised,
            with attributes) are read at once. Default False.
        pin_memory: load into page-locked memory, like that of ``pinned_empty``, for tensors that go on to a GPU or to
            another file. It counts against ``RLIMIT_MEMLOCK``; memory beyond the limit is not locked. Default False.
        verify: how much to compare with the checksums of the file. ``"full"``: every byte, including names, dtypes
            and shapes. ``"sample"``: names, dtypes, shapes and 1/32 of the tensors. ``"off"``: nothing. ``"auto"``
            (default): at least the sample, and as much as 3% of the load's time allows. ``stats()`` reports the
            amount (``bytes_compared``, ``bytes_not_compared``).
        engine: the engine that transfers the bytes. Default: the default engine.
        progress: as for ``save``.
        map_location: ``torch.load``'s name for ``device``. Like there, it may also be a dict of devices (saved device
            to new one), or a function of a storage and the device that it was saved from. Both need a load without
            ``into``, ``lazy`` and ``pin_memory``. Tensors in safetensors files count as saved from ``"cpu"``.
        weights_only: only True (default), for calls that were written for ``torch.load``. No other way is offered.
        mmap: only False (default), for calls that were written for ``torch.load``. ``lazy=True`` reads tensors on first
            use.

    Returns:
        The saved object. For safetensors, a dict of names to tensors. With ``into``, that state.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        deepnvme.errors.UnsafeFileError: the file asks to run code; the message names it.
        deepnvme.errors.CorruptFileError: the file is truncated or damaged; ``offset`` says where.
        deepnvme.errors.ChecksumError: the bytes are not those that were saved.
        KeyError: a name or pattern of ``only`` matches no tensor, or the file lacks a tensor that ``into`` names.
        TypeError, ValueError: an argument is of the wrong type, or two of them contradict each other.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        >>> _ = deepnvme.save(model.state_dict(), "model.pt")
        >>> state = deepnvme.load("model.pt", verify="full")
        >>> list(deepnvme.load("model.pt", only="*.weight"))
        ['0.weight', '1.weight']
        >>> _ = deepnvme.load("model.pt", into=model.state_dict())
    """
    check_file_path(path, "load", "call torch.load(deepnvme.open(path))")
    _check_torch_arguments(weights_only, mmap)
    check_engine(engine)
    require_torch("load")
    refuse_fake_tensors("load")
    check_choice(verify, "verify", ("auto", "off", "sample", "full"))
    _check_combination(into, only, lazy=lazy, cast=cast)
    place, restore_location = _destination(device, map_location)
    if pin_memory and (into is not None or place.type != "cpu"):
        msg = "pin_memory is for host memory that load allocates; omit it with into, and with another device"
        raise ValueError(msg)
    if restore_location is not None and (into is not None or lazy or pin_memory):
        msg = "a map_location that chooses the device of each storage excludes into, lazy and pin_memory"
        raise ValueError(msg)
    report = progress_callback(progress, "loading", path)
    request = LoadRequest(path, place, _patterns(only), verify, engine, report, pin_memory, restore_location)
    if into is not None:
        from deepnvme._checkpoint.load_into import fill  # noqa: PLC0415

        with memory_errors_with_path(request.name):
            return fill(request, into, cast)
    if lazy:
        from deepnvme._checkpoint.lazy import load_lazily  # noqa: PLC0415

        with memory_errors_with_path(request.name):
            return load_lazily(request)
    return request.load()


def _check_torch_arguments(weights_only: object, mmap: object) -> None:
    """Refuse arguments of ``torch.load`` that have another name here, or that ask to run code."""
    if mmap:
        msg = "deepnvme.load maps no files; use lazy=True, which reads each tensor on first use"
        raise InvalidArgumentError(msg)
    if weights_only is None or weights_only:
        return
    msg = (
        "deepnvme.load never runs code from a file, so weights_only=False is impossible; leave it out. If the file "
        "asks for a class that you trust, allow it: torch.serialization.add_safe_globals([Class]). To run the pickle "
        "of a file that you trust entirely, use torch.load(path, weights_only=False)"
    )
    raise InvalidArgumentError(msg)


def _check_combination(into: object, only: object, *, lazy: bool, cast: bool) -> None:
    """Refuse arguments that contradict each other."""
    if sum((into is not None, only is not None, lazy)) > 1 and not (only is not None and lazy):
        msg = "into, only and lazy cannot be combined, except lazy with only; choose one"
        raise ValueError(msg)
    if cast and into is None:
        msg = "cast needs into; without it, use tensor.to(dtype)"
        raise ValueError(msg)
    if into is not None and not isinstance(into, Mapping | list | tuple):
        remedy = "; pass model.state_dict()" if hasattr(into, "state_dict") else ""
        msg = f"into must be a state of nested dicts, lists and tensors, not {type(into).__name__}{remedy}"
        raise TypeError(msg)


def _destination(device: Any, map_location: Any) -> tuple[torch.device, _RestoreLocation]:
    """Return the device to read to, and the function that moves each storage on, as ``torch.load`` makes it."""
    import torch  # noqa: PLC0415

    if map_location is None:
        return torch.device(device), None
    if device != "cpu":
        msg = "device and map_location mean the same; pass one of them"
        raise ValueError(msg)
    if isinstance(map_location, str | int | torch.device):
        return torch.device(map_location), None
    if not callable(map_location) and not isinstance(map_location, Mapping):
        msg = (
            f"map_location is {map_location!r} ({type(map_location).__name__}); pass a device, a dict of devices, or a "
            "function of a storage and its saved device"
        )
        raise TypeError(msg)
    chosen = dict(map_location) if isinstance(map_location, Mapping) else map_location
    found: _RestoreLocation = torch.serialization._get_restore_location(chosen)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return torch.device("cpu"), found


def _patterns(only: str | Iterable[str] | None) -> list[str] | None:
    if only is None:
        return None
    patterns: list[Any] = [only] if isinstance(only, str) else list(only)
    for pattern in patterns:
        if not isinstance(pattern, str):
            msg = f"only must be names of tensors, not {type(pattern).__name__}"
            raise TypeError(msg)
    return patterns


@dataclass
class LoadRequest:
    """The checked arguments of a load."""

    path: _Path
    device: torch.device
    only: list[str] | None
    verify: str
    engine: Engine | None
    report: _Report
    pin_memory: bool = False
    restore_location: _RestoreLocation = None
    """Chooses the device of each storage, by the location that it was saved with. Default: all go to ``device``."""

    @property
    def name(self) -> str:
        """The path, for error messages."""
        return os.fsdecode(self.path) if isinstance(self.path, bytes) else str(self.path)

    def for_files(self, work: Callable[[list[SourceFile]], _Result]) -> _Result:
        """Run ``work`` on the files of the path. If they are replaced meanwhile, run it again on the new ones."""
        return retry_if_replaced(self.name, self._files, work)

    def _files(self) -> list[SourceFile]:
        if isinstance(self.path, StripeSet):
            # Parts that were replaced have new names. The manifest lists them.
            try:
                return [SourceFile(StripeSet.from_manifest(self.path.manifest_path))]
            except FileNotFoundError:
                return [SourceFile(self.path)]
        return [SourceFile(*found) for found in _find_set(self.path, self.verify != "off")]

    def open(self, file: SourceFile, *, exact: bool = False) -> _CheckpointReader:
        """Open one of the files."""
        reader = _CheckpointReader(file.path, self.engine, exact, file.names)
        if self.verify != "off":
            reader.check(file.identity)
        if reader.coverage == "stale":
            msg = f"{file.path}: its checksums belong to another file that was copied into this one; they are ignored"
            warnings.warn(msg, stacklevel=2)
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
        """Raise ``KeyError`` if ``only`` has a pattern that no tensor of an index matches, before anything is read."""
        self.select([name for file in files for name in file.names or ()], None)

    def _load_file(self, file: SourceFile) -> Any:
        reader = self.open(file)
        try:
            return self._read(reader, file.path, file.names)
        except MovedError:
            # Another program placed the records differently than the directory suggests.
            return self._read(self.open(file, exact=True), file.path, file.names)

    def _read(self, reader: _CheckpointReader, path: Any, names: list[str] | None) -> Any:
        if self.only is None and names is None:
            # Everything: start reading before looking at names.
            buffers = self._start(reader, list(range(reader.storage_count)))
            if reader.format == "safetensors":
                return self._safetensors(reader.tensors(), buffers)
            return self._archive(reader, path, list(range(reader.storage_count)), buffers, None)
        tensors = reader.tensors()
        chosen = set(self.select([tensor[0] for tensor in tensors], names))
        wanted = sorted({tensor[5] for tensor in tensors if tensor[0] in chosen})
        buffers = self._start(reader, wanted)
        if reader.format == "safetensors":
            return self._safetensors([tensor for tensor in tensors if tensor[0] in chosen], buffers)
        return self._archive(reader, path, wanted, buffers, list(chosen))

    def _start(self, reader: _CheckpointReader, wanted: list[int]) -> LoadBuffers | None:
        """Start to read storages. The meta device needs no bytes."""
        from deepnvme._checkpoint.load_buffer import LoadBuffers  # noqa: PLC0415

        return (
            None if self.device.type == "meta" else LoadBuffers(reader, wanted, self.device, pin_memory=self.pin_memory)
        )

    def select(self, there: list[str], names: list[str] | None) -> list[str]:
        """Return the names of the tensors to load from a file: those in ``names``, or all.

        If these are all tensors of the state, each pattern of ``only`` must match one of them.
        """
        from deepnvme._checkpoint.tensor_names import NamePatterns  # noqa: PLC0415

        listed = there if names is None else [*filter(set(names).__contains__, there)]
        if self.only is None:
            return listed
        patterns = NamePatterns(self.only)
        chosen = [*filter(patterns.matches, listed)]
        if names is None and (patterns.unmatched or not chosen):
            shown = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")  # noqa: PLR2004
            msg = f"{self.name}: no tensor matches {patterns.unmatched}; there are {shown or 'no tensors'}"
            raise KeyError(msg)
        return chosen

    def _safetensors(self, tensors: list[Any], buffers: LoadBuffers | None) -> dict[str, torch.Tensor]:
        import torch  # noqa: PLC0415

        described = [(name, getattr(torch, dtype), shape, index) for name, dtype, shape, _, _, index in tensors]
        if buffers is None:
            return {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape, _ in described}
        state = {name: buffers.flat(index, dtype).view(shape) for name, dtype, shape, index in described}
        buffers.finish(self.verify, self.report)
        if self.restore_location is not None:
            return {name: self._restored(tensor) for name, tensor in state.items()}
        if self.device.type != "cpu":
            # On devices that the engine reaches, the tensors are there already, and this copies nothing.
            state = {name: tensor.to(self.device) for name, tensor in state.items()}
        return state

    def _restored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor of a file that records no devices."""
        import torch  # noqa: PLC0415

        if self.restore_location is None:
            return tensor
        storage = self.restore_location(tensor.untyped_storage(), "cpu")
        moved = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _archive(
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
        from deepnvme._utils.tensors import engine_reaches  # noqa: PLC0415

        storages: list[torch.UntypedStorage | None] = [None] * reader.storage_count
        unpickler = SafeUnpickler(path, SizeLimits(path, reader))
        if buffers is None:
            sizes = [storage[1] for storage in reader.storages()]
            for index in wanted:
                storages[index] = torch.empty(sizes[index], dtype=torch.uint8, device="meta").untyped_storage()
            with errors_with_path(path):
                return reader.build(unpickler, storages, chosen)
        builds_early = engine_reaches(self.device) and reader.is_plain and self.restore_location is None
        if not builds_early:
            buffers.finish(self.verify, self.report)
        for index in wanted:
            storages[index] = buffers.storage(index, self.device)
        if self.restore_location is not None:
            locations = [storage[2] for storage in reader.storages()]
            storages = [
                None if storage is None else self.restore_location(storage, location)
                for storage, location in zip(storages, locations, strict=True)
            ]
        # Ordinary objects are built while their bytes are read.
        with errors_with_path(path):
            state = reader.build(unpickler, storages, chosen)
        if builds_early:
            buffers.finish(self.verify, self.report)
        return state


def retry_if_replaced(name: object, find: Callable[[], _Files], work: Callable[[_Files], _Result]) -> _Result:
    """Run ``work`` on the files that an index lists. If the index is replaced meanwhile, run it on the new files.

    A save of several files removes the old ones once the new index is there. A reader of the old index then misses a
    file, or finds another under its name.
    """
    files = find()
    for _ in range(_REPLACEMENTS_MAX):
        try:
            return work(files)
        except (FileNotFoundError, CorruptFileError, ChecksumError):  # noqa: PERF203 (rarely more than once)
            now = find()
            if now == files:
                raise
            files = now
    msg = f"{name}: its files were replaced again and again during the load; load it again"
    raise Error(msg)


@contextmanager
def memory_errors_with_path(name: str) -> Iterator[None]:
    """Raise failed allocations as ``OutOfMemoryError`` with the name of the file."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.filename is not None or name in str(error):
            raise
        raise OutOfMemoryError(f"{name}: {error}") from error
    except MemoryError as error:
        raise OutOfMemoryError(f"{name}: there is not enough memory for the file's objects") from error
    except BaseException as error:
        # If Python cannot allocate an object, the extension panics.
        if type(error).__name__ != "PanicException" or str(error) != "Python API call failed":
            raise
        raise OutOfMemoryError(f"{name}: there is not enough memory for the file's objects") from error
