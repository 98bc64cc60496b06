"""Packed tables: their description in the metadata of a safetensors file, and the rows that they hold together."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._checkpoint.load_request import LoadRequest, storage_entries, tensor_entries
from deepnvme._rows.locate import QUANTISED, Located
from deepnvme.errors import CorruptFileError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from deepnvme._checkpoint.load_request import SourceFile
    from deepnvme._deepnvme import Engine, _CheckpointReader


_TENSOR, _HOT_TENSOR, _KEY, _VERSION = "rows", "hot_rows", "deepnvme.rows", 1
# Of a hot row, in its list.
_NUMBER_BYTES = 4
# Copies make a file larger by this fraction of its rows at most.
_FRACTION_MAX = 8
# Numbers of hot rows have 32 bits in the file.
_ROWS_MAX = 1 << 32


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
    try:
        description = json.loads(text)
        packed = _parse(files[0].path, description, (reader, stored[_TENSOR].offset))
        hot = _parse_hot(description, stored.get(_HOT_TENSOR))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        msg = f"{request.name}: the description of the packed table is damaged ({error}); pack the table again"
        raise CorruptFileError(msg) from error
    rows_per_block, block_bytes, _ = packed.blocks
    nbytes, copies = stored[_TENSOR].nbytes, 0 if hot is None else hot[1]
    if -(-(packed.rows.rows + copies) // rows_per_block) * block_bytes != nbytes:
        msg = f"{request.name}: {nbytes} bytes are not those of the packed table that it describes; pack it again"
        raise CorruptFileError(msg)
    return packed._replace(blocks=(rows_per_block, block_bytes, hot))


def _parse_hot(described: dict[str, Any], stored: Any) -> tuple[int, int, int] | None:
    """Return the list of hot rows: its offset, its length and its checksum."""
    if stored is None:
        return None
    rows, checksum = (_size(described["hot"][key], least=0) for key in ("rows", "crc32c"))
    if stored.nbytes != rows * _NUMBER_BYTES or checksum >= 1 << 32:
        msg = f"{stored.nbytes} bytes are not {rows} hot rows"
        raise ValueError(msg)
    return stored.offset, rows, checksum


def _parse(path: Any, described: dict[str, Any], place: tuple[_CheckpointReader, int]) -> Packed:
    version = _size(described["version"])
    if version > _VERSION:
        msg = f"{path}: version {version} of packed tables needs a later deepnvme; this one reads {_VERSION}"
        raise UnsupportedError(msg)
    row = described["row"]
    dtype, shape = _dtype(row["dtype"]), tuple(_size(size) for size in row["shape"])
    scales = None
    scale_bytes = 0
    if row.get("scales") is not None:
        scales = _dtype(row["scales"]["dtype"]), _size(row["scales"]["count"])
        scale_bytes = scales[0].itemsize * scales[1]
    reader, offset = place
    located = Located([reader], [(0, offset, _size(described["rows"], least=0))], shape, dtype)
    row_bytes = _size(described["row_bytes"])
    if located.row_bytes + scale_bytes != row_bytes:
        msg = f"rows of {row_bytes} bytes are not {shape} of {dtype}"
        raise ValueError(msg)
    blocks = _size(described["rows_per_block"]), _size(described["block_bytes"])
    return Packed(located, row_bytes, (*blocks, None), scales)


def _size(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        msg = f"{value!r} is no size"
        raise ValueError(msg)
    return value


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype) or dtype in QUANTISED:
        msg = f"{name!r} is no dtype"
        raise TypeError(msg)
    return dtype


def hot_rows(ids: torch.Tensor, rows: int) -> list[int]:
    """Return rows that occur more than once in a trace, in the order in which they occur first.

    Rows that are requested at the same time then lie near each other, and so do the most frequent ones.

    Raises:
        IndexError: the trace has an id that is no row.
    """
    if rows >= _ROWS_MAX or ids.numel() == 0:
        return []
    # torch has no unique values of the unsigned types beyond 8 bits.
    trace = ids.flatten().to(torch.int64)
    numbers, places, counts = torch.unique(trace, return_inverse=True, return_counts=True)
    for number in (int(numbers[0]), int(numbers[-1])):
        if not 0 <= number < rows:
            msg = f"trace has the id {number}, which is no row: the table has {rows} rows, from 0 on"
            raise IndexError(msg)
    first = torch.full_like(numbers, len(trace)).scatter_reduce_(0, places, torch.arange(len(trace)), "amin")
    hottest = torch.argsort(counts, descending=True, stable=True)[: min(rows // _FRACTION_MAX, int((counts > 1).sum()))]
    in_order = hottest[torch.argsort(first[hottest])]
    hot: list[int] = numbers[in_order].tolist()
    return hot
