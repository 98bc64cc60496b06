"""The tensors of a model's files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepnvme._checkpoint.load import retry_if_replaced
from deepnvme._deepnvme import StripeSet, _CheckpointReader, _find_set, _packed_tensors
from deepnvme._stream.pieces import Origin, Piece
from deepnvme._utils.arguments import path_of
from deepnvme._utils.strides import row_major
from deepnvme.errors import ChangedFileError, CorruptFileError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from deepnvme._deepnvme import Engine

    _Found = tuple[str | PathLike[str] | StripeSet, list[str] | None, tuple[int, int] | None]

_PACKED_NAME = "packed.safetensors"
# The header's text that says how each weight is packed.
_PACKED_KEY = "deepnvme.packed"


@dataclass(frozen=True)
class _Stamp:
    """What changes when a file is replaced, cut or written to."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> _Stamp | None:
        try:
            stat = os.stat(path)  # noqa: PTH116
        except OSError:
            return None
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class ModelFiles:
    """The files that a path means, and where in them each tensor lies.

    Args:
        path: a folder as Hugging Face lays it out, an index, a safetensors file or a torch archive, or a stripe set.
        engine: reads the headers.
        verify: how much is compared with checksums before anything is used: ``"off"``, ``"sample"`` or ``"full"``.
    """

    def __init__(
        self, path: str | PathLike[str] | StripeSet, engine: Engine | None = None, verify: str = "sample"
    ) -> None:
        self.sources: list[str | StripeSet] = []
        self.tensors: dict[str, Origin] = {}
        self._stamps: dict[str, _Stamp | None] = {}
        self._verify = verify
        if isinstance(path, StripeSet):
            self._open([(path, None, None)], engine)
            return
        packed = _packed_in(path)
        if packed is not None:
            self._open([(packed, None, None)], engine)
            return
        retry_if_replaced(path, lambda: _find_set(path, verify != "off"), lambda found: self._open(found, engine))

    def check(self) -> None:
        """Make sure that the files are still those that the tensors were looked up in.

        Raises:
            ChangedFileError: one was replaced, cut or written to.
        """
        for path, stamp in self._stamps.items():
            if _Stamp.of(path) != stamp:
                error = ChangedFileError(f"{path}: this file was replaced while the model was opened; open it again")
                error.filename = path
                raise error

    def _open(self, found: Sequence[_Found], engine: Engine | None) -> None:
        self.sources.clear()
        self.tensors.clear()
        self._stamps.clear()
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
        # Before the file is opened: what changes in between shows later.
        self._stamps.update({path: _Stamp.of(path) for path in ([file] if isinstance(file, str) else file.paths)})
        reader = _CheckpointReader(file, engine, True, names)
        # Names, types and places of tensors are read from it only here.
        if self._verify != "off":
            reader.check(identity)
            reader.audit(self._verify)
        if _is_packed(file) and _PACKED_KEY not in dict(reader.metadata):
            label = file if isinstance(file, str) else file.manifest_path
            error = CorruptFileError(
                f"{label}: the header says nothing of how the weights are packed; restore the file from a copy, or pack "
                "the model again"
            )
            error.filename = os.fspath(label)
            raise error
        source = len(self.sources)
        self.sources.append(file)
        places = [offset for _, _, _, offset in reader.storages()]
        packed = {name: (dtype, shape, stored) for name, dtype, shape, stored in _packed_tensors(reader, source)}
        signed = {number for number, *_ in reader.signs()}
        wanted = None if names is None else set(names)
        for number, (name, dtype_name, shape, strides, first, storage) in enumerate(reader.tensors()):
            if wanted is not None and name not in wanted:
                continue
            if name in packed:
                decoded_name, decoded_shape, stored = packed[name]
                decoded = Origin((), getattr(torch, decoded_name), tuple(decoded_shape))
                self.tensors[name] = replace(decoded, pieces=(Piece(source, 0, decoded.nbytes, stored),))
                continue
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = torch.Size(shape)
            if number in signed or (tuple(strides) != row_major(shape) and size.numel() > 1):
                label = file if isinstance(file, str) else file.manifest_path
                raise UnsupportedError(
                    f"{label}: {name} does not lie row by row (shape {tuple(shape)}, strides {tuple(strides)}), or is "
                    "a lazy conjugate or negative, so that it cannot be read in pieces; convert the file first: "
                    f"deepnvme convert {Path(label).name} model.safetensors"
                )
            piece = Piece(source, places[storage] + first * dtype.itemsize, size.numel() * dtype.itemsize)
            pieces = (piece,) if piece.nbytes else ()
            self.tensors[name] = Origin(pieces, dtype, tuple(shape))


def _is_packed(file: str | StripeSet) -> bool:
    """Whether a file has the name that only packed models have."""
    path = Path(file if isinstance(file, str) else file.manifest_path)
    return path.name in {_PACKED_NAME, f"{_PACKED_NAME}.stripes.json"}


def _packed_in(path: str | PathLike[str]) -> str | StripeSet | None:
    """Find what ``deepnvme pack`` has made of a folder: one file, or stripes of one."""
    folder = path_of(path)
    for name in (_PACKED_NAME, "model.safetensors"):
        manifest = folder / f"{name}.stripes.json"
        if manifest.is_file():
            return StripeSet.from_manifest(manifest)
    packed = folder / _PACKED_NAME
    return os.fspath(packed) if packed.is_file() else None
