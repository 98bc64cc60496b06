"""Find the tensors in a model's files, which file and where in it, and compare a module with them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepnvme._checkpoint.load_request import (
    SourceFile,
    StorageEntry,
    TensorEntry,
    for_files,
    storage_entries,
    tensor_entries,
)
from deepnvme._deepnvme import StripeSet, _CheckpointReader, _packed_tensors
from deepnvme._modules.weight_classes import has_no_values, is_on_disk
from deepnvme._stream.weight_origin import ByteRange, Origin, named_tensors
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.public import first_of, to_path, warn_caller
from deepnvme._utils.tensors import row_major
from deepnvme.errors import ChangedFileError, CorruptFileError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from torch import nn

    from deepnvme._deepnvme import Engine, _StoredTensor

_MANIFEST_SUFFIX = ".stripes.json"
_PACKED_NAME = "packed.safetensors"
# The header entry that says how each weight is packed.
_PACKED_KEY = "deepnvme.packed"


@dataclass(frozen=True)
class _FileVersion:
    """The stat fields that change when a file is replaced, truncated or written."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> _FileVersion | None:
        try:
            stat = os.stat(path)  # noqa: PTH116
        except OSError as error:
            if is_of_handler(error):
                raise
            return None
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class ModelFiles:
    """The files that a path refers to, and the position of each tensor in them.

    Args:
        path: a Hugging Face folder, the folder of a packed or striped model, an index, a safetensors file, a torch
            archive, or a stripe set.
        engine: the engine that reads the headers.
        verify: how much to compare with checksums before use: ``"off"``, ``"sample"`` or ``"full"``.
    """

    def __init__(
        self, path: str | PathLike[str] | StripeSet, engine: Engine | None = None, verify: str = "sample"
    ) -> None:
        self.sources: list[str | StripeSet] = []
        self.tensors: dict[str, Origin] = {}
        self._versions: dict[str, _FileVersion | None] = {}
        self._verify = verify
        found = None if isinstance(path, StripeSet) else _find_packed_or_striped(path)
        if found is not None:
            self._open([SourceFile(found)], engine)
            return
        for_files(path, verify, lambda files: self._open(files, engine))

    def check_unchanged(self) -> None:
        """Check that the files are the ones whose headers were read.

        Raises:
            ChangedFileError: a file was replaced, truncated or written.
        """
        for path, version in self._versions.items():
            if _FileVersion.of(path) != version:
                msg = f"{path}: this file was replaced while the model was being opened; open it again"
                error = ChangedFileError(msg)
                error.filename = path
                raise error

    def label(self, origin: Origin) -> str:
        """Return the path of the file with a tensor, for errors."""
        sources = [self.sources[each.source] for each in origin.ranges[:1]] or self.sources[:1]
        return ", ".join(os.fspath(_label(source)) for source in sources)

    def _open(self, found: Sequence[SourceFile], engine: Engine | None) -> None:
        self.sources.clear()
        self.tensors.clear()
        self._versions.clear()
        for file, names, fingerprint in found:
            source = file if isinstance(file, StripeSet) else os.fspath(file)
            self._add(source, names, fingerprint, engine)

    def _add(
        self,
        file: str | StripeSet,
        names: list[str] | None,
        fingerprint: tuple[int, int] | None,
        engine: Engine | None,
    ) -> None:
        if isinstance(file, str) and file.endswith(_MANIFEST_SUFFIX) and Path(file).is_file():
            file = StripeSet.from_manifest(file)
        # Taken before the file is opened, so that a later check notices any change since.
        paths = [file] if isinstance(file, str) else [file.manifest_path, *file.paths]
        self._versions.update({path: _FileVersion.of(path) for path in paths})
        reader = _CheckpointReader(file, engine, True, names, complete=self._verify == "full")
        # Names, types and offsets of tensors are read only here.
        if self._verify != "off":
            reader.check(fingerprint)
            reader.verify_tensors(self._verify)
        if _is_packed(file) and _PACKED_KEY not in dict(reader.metadata):
            error = CorruptFileError(
                f"{_label(file)}: the header does not say how the weights are packed; restore the file from a copy, or "
                "pack the model again"
            )
            error.filename = os.fspath(_label(file))
            raise error
        source = len(self.sources)
        self.sources.append(file)
        storages = storage_entries(reader)
        packed = {
            name: _packed_origin(source, dtype, shape, encoded)
            for name, dtype, shape, encoded in _packed_tensors(reader, source)
        }
        signed = {number for number, *_ in reader.signs()}
        wanted = None if names is None else set(names)
        for number, entry in enumerate(tensor_entries(reader)):
            if wanted is not None and entry.name not in wanted:
                continue
            origin = packed.get(entry.name)
            if origin is None:
                if number in signed or not _is_row_major(entry):
                    raise UnsupportedError(_parts_message(file, entry))
                origin = _origin(source, entry, storages[entry.storage])
            self.tensors[entry.name] = origin


def open_for_module(
    model: nn.Module, weights: str | PathLike[str] | StripeSet | None, engine: Engine | None, verify: str
) -> tuple[nn.Module, ModelFiles]:
    """Open the files of a module's weights, and refuse those of another module."""
    if getattr(model, "hf_device_map", None) or hasattr(model, "_hf_hook"):
        raise UnsupportedError(
            "accelerate has placed this model (hf_device_map) and moves its weights itself; load it without device_map"
        )
    if weights is None:
        raise UnsupportedError(
            "a module needs a file with its weights: deepnvme.save(module.state_dict(), 'weights.safetensors'), "
            "then deepnvme.stream(module, weights='weights.safetensors', memory=...)"
        )
    files = ModelFiles(weights, engine, verify)
    state = dict(named_tensors(model))
    if (on_disk := next((name for name, tensor in state.items() if is_on_disk(tensor)), None)) is not None:
        raise UnsupportedError(
            f"{on_disk} is on disk already: a part of this model, or a model that shares it, is offloaded or streamed; "
            "close that first"
        )
    unknown = [name for name in files.tensors if name not in state]
    if unknown:
        raise UnsupportedError(
            f"{weights} contains {unknown[0]}, which the module lacks; save the module's own state dict"
        )
    for name, origin in files.tensors.items():
        if tuple(state[name].shape) != origin.shape or state[name].dtype != origin.dtype:
            raise UnsupportedError(
                f"{weights}: {name} is {origin.dtype} of shape {origin.shape}; the module has {state[name].dtype} of "
                f"shape {tuple(state[name].shape)}"
            )
    _warn_of_own_values(model, weights, files, state)
    return model, files


def _warn_of_own_values(model: nn.Module, weights: object, files: ModelFiles, state: dict[str, torch.Tensor]) -> None:
    """Name the parameters that keep the module's values, because the files lack them."""
    loaded = {id(state[name]) for name in files.tensors}
    kept = [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in loaded and not has_no_values(parameter)
    ]
    if kept:
        warn_caller(f"{weights} lacks {first_of(kept)}; the model keeps the module's own values for them")


def _packed_origin(source: int, dtype: str, shape: Sequence[int], encoded: _StoredTensor) -> Origin:
    decoded = Origin((), getattr(torch, dtype), tuple(shape))
    return replace(decoded, ranges=(ByteRange(source, 0, decoded.nbytes, encoded),))


def _origin(source: int, entry: TensorEntry, storage: StorageEntry) -> Origin:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    nbytes = math.prod(entry.shape) * dtype.itemsize
    ranges = (ByteRange(source, storage.offset + entry.storage_offset * dtype.itemsize, nbytes),) if nbytes else ()
    return Origin(ranges, dtype, tuple(entry.shape))


def _is_row_major(entry: TensorEntry) -> bool:
    # A dimension of one element may have any stride.
    strides = zip(entry.shape, entry.strides, row_major(entry.shape), strict=True)
    return math.prod(entry.shape) <= 1 or all(size == 1 or stride == expected for size, stride, expected in strides)


def _parts_message(file: str | StripeSet, entry: TensorEntry) -> str:
    return (
        f"{_label(file)}: {entry.name} is not stored row by row (shape {tuple(entry.shape)}, strides "
        f"{tuple(entry.strides)}), or is a lazy conjugate or negative, so it cannot be read in parts; convert the file "
        f"first: deepnvme convert {Path(_label(file)).name} model.safetensors"
    )


def _label(file: str | StripeSet) -> str | Path:
    """Return the path that errors name."""
    return file if isinstance(file, str) else file.manifest_path


def _is_packed(file: str | StripeSet) -> bool:
    """Whether a file has a name that only packed models use."""
    return Path(_label(file)).name in {_PACKED_NAME, f"{_PACKED_NAME}{_MANIFEST_SUFFIX}"}


def _find_packed_or_striped(path: str | PathLike[str]) -> str | StripeSet | None:
    """Find a packed model in a folder, in one file or a stripe set, or plain weights in a stripe set."""
    folder = to_path(path)
    for name in (_PACKED_NAME, "model.safetensors"):
        manifest = folder / f"{name}{_MANIFEST_SUFFIX}"
        if manifest.is_file():
            return StripeSet.from_manifest(manifest)
    packed = folder / _PACKED_NAME
    return os.fspath(packed) if packed.is_file() else None
