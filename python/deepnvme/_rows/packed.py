"""Packed tables: their description in the metadata of a safetensors file, and the rows that they hold together."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from deepnvme._checkpoint.load_request import LoadRequest, storage_entries, tensor_entries
from deepnvme._deepnvme import _parse_packed_rows
from deepnvme._rows.locate import Located
from deepnvme._utils.terminal import printable
from deepnvme.errors import CorruptFileError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from deepnvme._checkpoint.load_request import SourceFile
    from deepnvme._deepnvme import Engine

_TENSOR, _HOT_TENSOR, _CHECKSUMS, _KEY = "rows", "hot_rows", "checksums", "deepnvme.rows"
# Copies of at most an eighth of the rows.
_HOT_ROWS_DIVISOR = 8
# Numbers of hot rows have 32 bits in the file.
_ROWS_MAX = 1 << 32


_Place: TypeAlias = tuple[int, int]


class Packed(NamedTuple):
    """A packed table."""

    rows: Located
    row_bytes: int
    """Bytes of a row, with its scales."""
    rows_per_block: int
    block_bytes: int
    has_checksum_list: bool
    """Whether the checksums of blocks are in memory, not in the blocks."""
    hot_rows: int
    first_rows: tuple[int, ...]
    """The first row of each tensor that was packed."""
    scales: tuple[torch.dtype, int] | None
    """The dtype and the number of the scales of a row."""
    source: tuple[str, tuple[_Place, _Place | None, _Place | None]]
    """Its description, and the offset and the bytes of each of its tensors, as the extension takes them."""
    id: int
    """Tells it from other tables, also from those of the same source."""


def describe(rows: Located, scales: Located | None) -> str:
    """Describe the rows of a table to pack."""
    row: dict[str, Any] = {"shape": rows.row_shape, "dtype": str(rows.dtype).removeprefix("torch.")}
    if scales is not None:
        row["scales"] = {"count": math.prod(scales.row_shape), "dtype": str(scales.dtype).removeprefix("torch.")}
    if len(rows.ranges) > 1:
        row["first_rows"] = rows.first_rows
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
    place = (stored[_TENSOR].offset, stored[_TENSOR].nbytes)
    hot, checksums = (
        (stored[name].offset, stored[name].nbytes) if name in stored else None for name in (_HOT_TENSOR, _CHECKSUMS)
    )
    tensors = (place, hot, checksums)
    rows, row_shape, dtype, scales, blocks, hot_rows, firsts, number = _parse_packed_rows(
        printable(request.name), text, tensors
    )
    located = Located([reader], [(0, place[0], rows)], tuple(row_shape), _dtype(request, dtype))
    kinds = None if scales is None else (_dtype(request, scales[1]), scales[0])
    return Packed(located, *blocks, hot_rows, tuple(firsts), kinds, (text, tensors), number)


def _dtype(request: LoadRequest, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        msg = f"{request.name}: torch {torch.__version__} has no dtype {name}; install a later one"
        raise UnsupportedError(msg)
    return dtype


def hot_rows(ids: torch.Tensor, rows: int) -> list[int]:
    """Return the most frequent rows of a trace of ids, in the order in which they occur first.

    They are those that occur more than once, up to an eighth of the table. Rows that are requested at the same time
    then lie near each other.

    Raises:
        IndexError: the trace of ids has one that is no row.
    """
    if rows >= _ROWS_MAX or ids.numel() == 0:
        return []
    # torch has no unique values of the unsigned types beyond 8 bits.
    trace = ids.flatten().to(torch.int64)
    numbers, places, counts = torch.unique(trace, return_inverse=True, return_counts=True)
    for number in (int(numbers[0]), int(numbers[-1])):
        if not 0 <= number < rows:
            # The unsigned ids from 2^63 on became negative.
            wrong = number + (1 << 64) if number < 0 and not ids.dtype.is_signed else number
            msg = f"the trace of ids has {wrong}, which is no row: the table has {rows} rows, from 0 on"
            raise IndexError(msg)
    first = torch.full_like(numbers, len(trace)).scatter_reduce_(0, places, torch.arange(len(trace)), "amin")
    hottest = torch.argsort(counts, descending=True, stable=True)[
        : min(rows // _HOT_ROWS_DIVISOR, int((counts > 1).sum()))
    ]
    in_order = hottest[torch.argsort(first[hottest])]
    hot: list[int] = numbers[in_order].tolist()
    return hot
