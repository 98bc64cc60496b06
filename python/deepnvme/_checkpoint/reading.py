"""``deepnvme.load``: a state, straight into the memory where it stays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.progress import Progress, watcher
from deepnvme._checkpoint.writing import check_torch
from deepnvme._deepnvme import StripeSet, _CheckpointReader, _locate
from deepnvme.errors import MovedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeAlias

    import torch

    from deepnvme._checkpoint.arena import Arenas
    from deepnvme._deepnvme import Engine

    _Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | StripeSet
    _Tell: TypeAlias = Callable[[int, int], object] | None


def load(
    path: _Path,
    *,
    device: str | int | torch.device = "cpu",
    only: str | Iterable[str] | None = None,
    into: Mapping[str, Any] | None = None,
    cast: bool = False,
    lazy: bool = False,
    pin_memory: bool = False,
    verify: Literal["off", "sample", "full"] = "sample",
    engine: Engine | None = None,
    progress: Progress = None,
) -> Any:
    """Load what ``deepnvme.save``, ``torch.save`` or safetensors saved.

    The bytes go from the disk into the memory of the tensors without a copy, and only those that are asked for. No code
    of the file is ever run: it may make tensors, containers and what ``torch.serialization.add_safe_globals`` allows,
    as with ``torch.load(weights_only=True)``. Peak memory is the state itself.

    Args:
        path: a torch archive, a safetensors file, an index of several (``*.index.json``), a folder with one of these as
            Hugging Face names them, or a ``StripeSet``.
        device: where the tensors go. Default: host memory. ``"meta"`` reads no tensor at all.
        only: names of tensors, or patterns of names (``"layers.0"`` with all below it, ``"*.weight"``). What has no
            such tensor is left out of dicts. Default: everything.
        into: a state whose tensors are filled in place, by name (a state dict, or one nested as the file is); it is
            returned. Each of its tensors must be in the file, with its shape.
        cast: whether ``into`` may have other element types than the file. Default False.
        lazy: give the state with tensors in it that are read at their first use; what is more than a tensor or a
            parameter (sparse, quantised, with attributes) is read at once. Default False.
        pin_memory: load into page-locked memory, as ``pinned_empty`` makes it: for tensors that go on to a GPU or to
            another file. It counts against ``RLIMIT_MEMLOCK``; beyond that it is not locked. Default False.
        verify: how much is compared with the checksums of the file: ``"off"``, ``"sample"`` (default: a 32nd) or
            ``"full"``.
        engine: which engine moves the bytes. Default: the default engine.
        progress: as for ``save``.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        deepnvme.errors.UnsafeFileError: the file asks for code; the message names it.
        deepnvme.errors.CorruptFileError: the file is cut or damaged; ``offset`` says where.
        deepnvme.errors.ChecksumError: the bytes are not those that were saved.
        KeyError: ``only`` or ``into`` names a tensor that the file does not have.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        >>> _ = deepnvme.save(model.state_dict(), "model.pt")
        >>> state = deepnvme.load("model.pt", verify="full")
        >>> list(deepnvme.load("model.pt", only="*.weight"))
        ['0.weight', '1.weight']
        >>> _ = deepnvme.load("model.pt", into=model.state_dict())
    """
    check_torch("load")
    if sum((into is not None, only is not None, lazy)) > 1 and not (only is not None and lazy):
        msg = "into, only and lazy exclude each other, but for lazy with only; choose one"
        raise ValueError(msg)
    if cast and into is None:
        msg = "cast is about the tensors that are filled, and needs into; otherwise use tensor.to(dtype)"
        raise ValueError(msg)
    if verify not in ("off", "sample", "full"):
        msg = f"verify is {verify!r}; it must be 'off', 'sample' or 'full'"
        raise ValueError(msg)
    import torch  # noqa: PLC0415

    if pin_memory and (into is not None or torch.device(device).type != "cpu"):
        msg = "pin_memory is about host memory that load makes; leave it out with into, and with another device"
        raise ValueError(msg)
    tell = watcher(progress, "loading", path)
    request = Request(path, torch.device(device), _patterns(only), verify, engine, tell, pin_memory)
    if into is not None:
        from deepnvme._checkpoint.into import fill  # noqa: PLC0415

        return fill(request, into, cast)
    if lazy:
        from deepnvme._checkpoint.lazy_state import load_lazily  # noqa: PLC0415

        return load_lazily(request)
    return request.load()


def _patterns(only: str | Iterable[str] | None) -> list[str] | None:
    if only is None:
        return None
    patterns: list[Any] = [only] if isinstance(only, str) else list(only)
    for pattern in patterns:
        if not isinstance(pattern, str):
            msg = f"only is names of tensors, not {type(pattern).__name__}"
            raise TypeError(msg)
    return patterns


@dataclass
class Request:
    """A load that has been understood."""

    path: _Path
    device: torch.device
    only: list[str] | None
    verify: str
    engine: Engine | None
    tell: _Tell
    pin_memory: bool = False

    @property
    def name(self) -> str:
        """The path, as messages have it."""
        return os.fsdecode(self.path) if isinstance(self.path, bytes) else str(self.path)

    def files(self) -> list[tuple[Any, list[str] | None]]:
        """Say which files the path means, and which tensors each is said to hold."""
        if isinstance(self.path, StripeSet):
            # Parts that were replaced have names of their own, which the manifest knows.
            try:
                return [(StripeSet.from_manifest(self.path.manifest_path), None)]
            except FileNotFoundError:
                return [(self.path, None)]
        return list(_locate(self.path))

    def open(self, path: Any, *, exact: bool = False) -> _CheckpointReader:
        """Open one of the files."""
        return _CheckpointReader(path, self.engine, exact)

    def load(self) -> Any:
        """Load all files; of several, the tensors are put into one dict."""
        files = self.files()
        if len(files) == 1 and files[0][1] is None:
            return self._load_file(files[0][0], None)
        whole: dict[str, Any] = {}
        found = False
        for path, names in files:
            part = self._load_file(path, names)
            found = found or bool(part)
            whole.update(part)
        if self.only is not None and not found:
            raise KeyError(self.nothing([]))
        return whole

    def _load_file(self, path: Any, names: list[str] | None) -> Any:
        reader = self.open(path)
        try:
            return self._read(reader, path, names)
        except MovedError:
            # Where another writer has put the records is not what the directory lets one expect.
            return self._read(self.open(path, exact=True), path, names)

    def _read(self, reader: _CheckpointReader, path: Any, names: list[str] | None) -> Any:
        if self.only is None and names is None:
            # Everything: the bytes are on their way before anybody looks at names.
            arenas = self._start(reader, list(range(reader.storage_count)))
            if reader.format == "safetensors":
                return self._safetensors(reader.tensors(), arenas)
            return self._archive(reader, path, list(range(reader.storage_count)), arenas, None)
        tensors = reader.tensors()
        chosen = set(self.choose([tensor[0] for tensor in tensors], names))
        if not chosen and names is None:
            raise KeyError(self.nothing([tensor[0] for tensor in tensors]))
        wanted = sorted({tensor[5] for tensor in tensors if tensor[0] in chosen})
        arenas = self._start(reader, wanted)
        if reader.format == "safetensors":
            return self._safetensors([tensor for tensor in tensors if tensor[0] in chosen], arenas)
        return self._archive(reader, path, wanted, arenas, list(chosen))

    def _start(self, reader: _CheckpointReader, wanted: list[int]) -> Arenas | None:
        """Start to read storages; on the meta device there is nothing to read."""
        from deepnvme._checkpoint.arena import Arenas  # noqa: PLC0415

        return None if self.device.type == "meta" else Arenas(reader, wanted, self.device, pin_memory=self.pin_memory)

    def choose(self, there: list[str], names: list[str] | None) -> list[str]:
        """Say which tensors of a file are wanted."""
        from deepnvme._checkpoint.names import Patterns  # noqa: PLC0415

        listed = None if names is None else set(names)
        patterns = None if self.only is None else Patterns(self.only)
        return [
            name
            for name in there
            if (listed is None or name in listed) and (patterns is None or patterns.matches(name))
        ]

    def nothing(self, there: list[str]) -> str:
        """Say that no tensor has a name that is wanted."""
        shown = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")  # noqa: PLR2004
        return f"{self.name}: no tensor is called {self.only}; there are {shown or 'others'}"

    def _safetensors(self, tensors: list[Any], arenas: Arenas | None) -> dict[str, torch.Tensor]:
        import torch  # noqa: PLC0415

        described = [(name, getattr(torch, dtype), shape, index) for name, dtype, shape, _, _, index in tensors]
        if arenas is None:
            return {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape, _ in described}
        state = {name: arenas.flat(index, dtype).view(shape) for name, dtype, shape, index in described}
        arenas.finish(self.verify, self.tell)
        if self.device.type != "cpu":
            # Where the engine has filled them, they are there already.
            state = {name: tensor.to(self.device) for name, tensor in state.items()}
        return state

    def _archive(
        self, reader: _CheckpointReader, path: Any, wanted: list[int], arenas: Arenas | None, chosen: list[str] | None
    ) -> Any:
        import torch  # noqa: PLC0415

        from deepnvme._checkpoint.bounds import Bounds  # noqa: PLC0415
        from deepnvme._checkpoint.devices import is_reached  # noqa: PLC0415
        from deepnvme._checkpoint.factory import Factory  # noqa: PLC0415

        storages: list[torch.UntypedStorage | None] = [None] * reader.storage_count
        factory = Factory(path, Bounds(path, reader))
        if arenas is None:
            sizes = [storage[1] for storage in reader.storages()]
            for index in wanted:
                storages[index] = torch.empty(sizes[index], dtype=torch.uint8, device="meta").untyped_storage()
            return reader.build(factory, storages, chosen)
        is_early = is_reached(self.device) and reader.is_plain
        if not is_early:
            arenas.finish(self.verify, self.tell)
        for index in wanted:
            storages[index] = arenas.storage(index, self.device)
        # Ordinary objects are made while their bytes are on their way.
        state = reader.build(factory, storages, chosen)
        if is_early:
            arenas.finish(self.verify, self.tell)
        return state
