"""Find the tensors in a model's files: which file, and where in it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepnvme._checkpoint.load_request import retry_if_replaced
from deepnvme._deepnvme import StripeSet, _CheckpointReader, _find_set, _packed_tensors
from deepnvme._stream.weight_origin import ByteRange, Origin
from deepnvme._utils.arguments import path_of
from deepnvme._utils.strides import row_major
from deepnvme.errors import ChangedFileError, CorruptFileError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from deepnvme._deepnvme import Engine

    _Found = tuple[str | PathLike[str] | StripeSet, list[str] | None, tuple[int, int] | None]


_PACKED_NAME = "packed.safetensors"
# The header entry that says how each weight is packed.
_PACKED_KEY = "deepnvme.packed"


@dataclass(frozen=True)
class _FileIdentity:
    """The stat fields that change when a file is replaced, truncated or written."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> _FileIdentity | None:
        try:
            stat = os.stat(path)  # noqa: PTH116
        except OSError:
            return None
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class ModelFiles:
    """The files that a path refers to, and the position of each tensor in them.

    Args:
        path: a Hugging Face folder, an index, a safetensors file, a torch archive, or a stripe set.
        engine: the engine that reads the headers.
        verify: how much to compare with checksums before use: ``"off"``, ``"sample"`` or ``"full"``.
    """

    def __init__(
        self, path: str | PathLike[str] | StripeSet, engine: Engine | None = None, verify: str = "sample"
    ) -> None:
        self.sources: list[str | StripeSet] = []
        self.tensors: dict[str, Origin] = {}
        self._identities: dict[str, _FileIdentity | None] = {}
        self._verify = verify
        if isinstance(path, StripeSet):
            self._open([(path, None, None)], engine)
            return
        packed = _find_packed(path)
        if packed is not None:
            self._open([(packed, None, None)], engine)
            return
        retry_if_replaced(path, lambda: _find_set(path, verify != "off"), lambda found: self._open(found, engine))

    def check_unchanged(self) -> None:
        """Check that the files are the ones whose headers were read.

        Raises:
            ChangedFileError: a file was replaced, truncated or written.
        """
        for path, identity in self._identities.items():
            if _FileIdentity.of(path) != identity:
                error = ChangedFileError(f"{path}: this file was replaced while the model was opened; open it again")
                error.filename = path
                raise error

    def _open(self, found: Sequence[_Found], engine: Engine | None) -> None:
        self.sources.clear()
        self.tensors.clear()
        self._identities.clear()
        for file, names, identity in found:
            source = file if isinstance(file, StripeSet) else os.fspath(file)
            self._add(source, names, identity, engine)

    def _add(
        self,
        file: str | StripeSet,
        names: list[str] | None,
        identity: tuple[int, int] | None,
        engine: Engine | None,
    ) -> None:
        # Taken before the file is opened, so that a later check notices any change since.
        self._identities.update(
            {path: _FileIdentity.of(path) for path in ([file] if isinstance(file, str) else file.paths)}
        )
        reader = _CheckpointReader(file, engine, True, names)
        # Names, types and offsets of tensors are read only here.
        if self._verify != "off":
            reader.check(identity)
            reader.verify_tensors(self._verify)
        if _is_packed(file) and _PACKED_KEY not in dict(reader.metadata):
            label = file if isinstance(file, str) else file.manifest_path
            error = CorruptFileError(
                f"{label}: the header does not say how the weights are packed; restore the file from a copy, or pack "
                "the model again"
            )
            error.filename = os.fspath(label)
            raise error
        source = len(self.sources)
        self.sources.append(file)
        places = [offset for _, _, _, offset in reader.storages()]
        packed = {name: (dtype, shape, encoded) for name, dtype, shape, encoded in _packed_tensors(reader, source)}
        signed = {number for number, *_ in reader.signs()}
        wanted = None if names is None else set(names)
        for number, (name, dtype_name, shape, strides, first, storage) in enumerate(reader.tensors()):
            if wanted is not None and name not in wanted:
                continue
            if name in packed:
                decoded_name, decoded_shape, encoded = packed[name]
                decoded = Origin((), getattr(torch, decoded_name), tuple(decoded_shape))
                self.tensors[name] = replace(decoded, ranges=(ByteRange(source, 0, decoded.nbytes, encoded),))
                continue
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = torch.Size(shape)
            if number in signed or (tuple(strides) != row_major(shape) and size.numel() > 1):
                label = file if isinstance(file, str) else file.manifest_path
                raise UnsupportedError(
                    f"{label}: {name} is not stored row by row (shape {tuple(shape)}, strides {tuple(strides)}), or is "
                    "a lazy conjugate or negative, so it cannot be read in parts; convert the file first: "
                    f"deepnvme convert {Path(label).name} model.safetensors"
                )
            byte_range = ByteRange(source, places[storage] + first * dtype.itemsize, size.numel() * dtype.itemsize)
            ranges = (byte_range,) if byte_range.nbytes else ()
            self.tensors[name] = Origin(ranges, dtype, tuple(shape))


def _is_packed(file: str | StripeSet) -> bool:
    """Whether a file has a name that only packed models use."""
    path = Path(file if isinstance(file, str) else file.manifest_path)
    return path.name in {_PACKED_NAME, f"{_PACKED_NAME}.stripes.json"}


def _find_packed(path: str | PathLike[str]) -> str | StripeSet | None:
    """Find the output of ``deepnvme pack`` in a folder: one file or a stripe set."""
    folder = path_of(path)
    for name in (_PACKED_NAME, "model.safetensors"):
        manifest = folder / f"{name}.stripes.json"
        if manifest.is_file():
            return StripeSet.from_manifest(manifest)
    packed = folder / _PACKED_NAME
    return os.fspath(packed) if packed.is_file() else None
