"""Packed tables: their description in the metadata of a safetensors file."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._checkpoint.load_request import LoadRequest
from deepnvme._checkpoint.source_files import storage_entries, tensor_entries
from deepnvme._deepnvme import _parse_packed_rows
from deepnvme._rows.locate import Located
from deepnvme.errors import CorruptFileError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from deepnvme._checkpoint.source_files import SourceFile
    from deepnvme._deepnvme import Engine

_TENSOR, _HOT_TENSOR, _KEY = "rows", "hot_rows", "deepnvme.rows"


class Packed(NamedTuple):
    """A packed table."""

    rows: Located
    row_bytes: int
    """Bytes of a row, with its scales."""
    blocks: tuple[int, int, tuple[int, int, int] | None]
    """Rows and bytes of a block; and the list of hot rows, if there are some: offset, count and CRC-32C."""
    scales: tuple[torch.dtype, int] | None
    """The dtype and the number of the scales of a row."""


def describe(rows: Located, scales: Located | None) -> str:
    """Describe the rows of a table to pack."""
    row: dict[str, Any] = {"shape": rows.row_shape, "dtype": str(rows.dtype).removeprefix("torch.")}
    if scales is not None:
        row["scales"] = {"count": math.prod(scales.row_shape), "dtype": str(scales.dtype).removeprefix("torch.")}
    return json.dumps(row)


def locate_packed(source: Any, engine: Engine | None) -> Packed:
    """Find the rows of a packed table.

    Raises:
        InvalidArgumentError: the file is no packed table.
        CorruptFileError: its description is damaged.
        UnsupportedError: a later version of deepnvme made it.
    """
    request = LoadRequest(path=source, device=torch.device("cpu"), verify="auto", engine=engine)
    return request.for_files(lambda files: _locate(request, files))


def _locate(request: LoadRequest, files: list[SourceFile]) -> Packed:
    reader = request.open(files[0], headers="read")
    text = dict(reader.metadata).get(_KEY)
    if len(files) > 1 or text is None:
        msg = (
            f"{request.name}: tensor is missing, and this is no packed table; name the tensor of a checkpoint file, or "
            "give shape and dtype of a raw file"
        )
        raise InvalidArgumentError(msg)
    storages = storage_entries(reader)
    stored = {entry.name: storages[entry.storage] for entry in tensor_entries(reader)}
    if _TENSOR not in stored:
        msg = f"{request.name}: the packed table has no tensor {_TENSOR!r}; pack the table again"
        raise CorruptFileError(msg)
    place, hot_place = stored[_TENSOR], stored.get(_HOT_TENSOR)
    hot_bytes = None if hot_place is None else hot_place.nbytes
    rows, row_shape, dtype, scales, blocks, hot = _parse_packed_rows(request.name, text, place.nbytes, hot_bytes)
    row_bytes, rows_per_block, block_bytes = blocks
    copies = None if hot is None or hot_place is None else (hot_place.offset, *hot)
    located = Located([reader], [(0, place.offset, rows)], tuple(row_shape), _dtype(request, dtype))
    kinds = None if scales is None else (_dtype(request, scales[1]), scales[0])
    return Packed(located, row_bytes, (rows_per_block, block_bytes, copies), kinds)


def _dtype(request: LoadRequest, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        msg = f"{request.name}: torch {torch.__version__} has no dtype {name}; install a later one"
        raise UnsupportedError(msg)
    return dtype
