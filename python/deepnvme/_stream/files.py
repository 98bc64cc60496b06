"""The tensors of a model's files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepnvme._deepnvme import StripeSet, _CheckpointReader, _locate, _packed_tensors
from deepnvme._stream.pieces import Origin, Piece
from deepnvme._strides import row_major
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from os import PathLike

    from deepnvme._deepnvme import Engine


class ModelFiles:
    """The files that a path means, and where in them each tensor lies.

    Args:
        path: a folder as Hugging Face lays it out, an index, a safetensors file or a torch archive, or a stripe set.
        engine: reads the headers.
    """

    def __init__(self, path: str | PathLike[str] | StripeSet, engine: Engine | None = None) -> None:
        self.sources: list[str | StripeSet] = []
        self.tensors: dict[str, Origin] = {}
        if isinstance(path, StripeSet):
            self._add(path, None, engine)
            return
        packed = _packed_in(path)
        if packed is not None:
            self._add(packed, None, engine)
            return
        for file, names in _locate(path):
            self._add(os.fspath(file), None if names is None else set(names), engine)

    def _add(self, file: str | StripeSet, names: set[str] | None, engine: Engine | None) -> None:
        reader = _CheckpointReader(file, engine, exact=True)
        source = len(self.sources)
        self.sources.append(file)
        places = [offset for _, _, _, offset in reader.storages()]
        packed = {name: (dtype, shape, stored) for name, dtype, shape, stored in _packed_tensors(reader, source)}
        for name, dtype_name, shape, strides, first, storage in reader.tensors():
            if names is not None and name not in names:
                continue
            if name in packed:
                decoded_name, decoded_shape, stored = packed[name]
                decoded = Origin((), getattr(torch, decoded_name), tuple(decoded_shape))
                self.tensors[name] = replace(decoded, pieces=(Piece(source, 0, decoded.nbytes, stored),))
                continue
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = torch.Size(shape)
            if tuple(strides) != row_major(shape) and size.numel() > 1:
                label = file if isinstance(file, str) else file.manifest_path
                raise UnsupportedError(
                    f"{label}: {name} does not lie row by row (shape {tuple(shape)}, strides {tuple(strides)}), so "
                    "that it cannot be read in pieces; convert the file first: "
                    f"deepnvme convert {Path(label).name} model.safetensors"
                )
            piece = Piece(source, places[storage] + first * dtype.itemsize, size.numel() * dtype.itemsize)
            pieces = (piece,) if piece.nbytes else ()
            self.tensors[name] = Origin(pieces, dtype, tuple(shape))


def _packed_in(path: str | PathLike[str]) -> str | StripeSet | None:
    """Find what ``deepnvme pack`` has made of a folder: one file, or stripes of one."""
    folder = Path(os.fspath(path))
    for name in ("packed.safetensors", "model.safetensors"):
        manifest = folder / f"{name}.stripes.json"
        if manifest.is_file():
            return StripeSet.from_manifest(manifest)
    packed = folder / "packed.safetensors"
    return os.fspath(packed) if packed.is_file() else None
