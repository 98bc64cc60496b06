"""Where the rows of a table are: in a raw file, or in tensors of checkpoint files."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._checkpoint.load_request import LoadRequest, SourceFile, find_files, storage_entries, tensor_entries
from deepnvme._deepnvme import StripeSet
from deepnvme._utils.public import WHOLE_MAX, names_text, shown, whole
from deepnvme._utils.tensors import checked_dtype
from deepnvme._utils.terminal import printable
from deepnvme.errors import ChangedFileError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepnvme._deepnvme import Engine, _CheckpointReader

FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# Types that gathers convert to floats.
CONVERTED = {**FLOATS, torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2", torch.int8: "int8"}
SCALES = {**FLOATS, torch.float8_e8m0fnu: "float8_e8m0fnu"}
QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
# A vector has no rows.
_DIMENSIONS_MIN = 2


class TableSource(NamedTuple):
    """A table, as the caller describes it."""

    source: Any
    tensor: str | Sequence[str] | None
    scales: str | Sequence[str] | None
    shape: Sequence[int] | None
    dtype: torch.dtype | None
    offset: int
    engine: Engine | None


class Located(NamedTuple):
    """Rows or scales, and their files."""

    files: list[Any]
    """Open checkpoint files, whose headers were read, or the path of a raw file."""
    ranges: list[tuple[int, int, int]]
    """For each part, in order: index of the file, offset of its first row in bytes, number of rows."""
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(rows for _, _, rows in self.ranges)

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The first row of each part."""
        return (0, *itertools.accumulate(rows for _, _, rows in self.ranges[:-1]))

    def behind(self, files: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return the ranges, with their files behind this many others, and the bytes of a row."""
        return [(files + file, offset, rows) for file, offset, rows in self.ranges], self.row_bytes


def locate_table(table: TableSource) -> tuple[Located, Located | None]:
    """Find the rows and the scales of a table that is not packed."""
    if check_described(table.dtype, table.shape):
        if table.tensor is not None or table.scales is not None:
            msg = "tensor and scales name tensors of a checkpoint file, and shape and dtype describe a raw file"
            raise InvalidArgumentError(msg)
        assert table.shape is not None
        assert table.dtype is not None
        return locate_raw(table.source, table.shape, table.dtype, table.offset), None
    if table.offset != 0:
        msg = f"offset is {shown(table.offset)}, and a checkpoint file says where its tensors are; leave offset out"
        raise InvalidArgumentError(msg)
    if table.tensor is None:
        msg = "tensor is missing: name the tensor of a checkpoint file, or give shape and dtype of a raw file"
        raise InvalidArgumentError(msg)
    rows = locate_tensors(table.source, check_names(table.tensor), table.engine)
    if table.scales is None:
        return rows, None
    return rows, _check_scales(rows, locate_tensors(table.source, check_names(table.scales), table.engine))


def refuse_as_target(target: Any, table: TableSource) -> None:
    """Refuse to write to a file of the table's own source, also to one without rows of the table.

    Raises:
        InvalidArgumentError: the target is such a file, or has the name of one that lists others.
    """
    parts = target.paths if isinstance(target, StripeSet) else ()
    targets = [path for path in (_name_of(target), *parts) if Path(path).exists()]
    for path in _all_files(table) if targets else ():
        if any(Path(one).samefile(path) for one in targets):
            msg = f"{printable(_name_of(target))} is a file of the source; name another file as the target"
            raise InvalidArgumentError(msg)
    if not isinstance(target, StripeSet) and _name_of(target).endswith((".index.json", ".stripes.json")):
        msg = f"{printable(_name_of(target))} names a list of files; name a file for the rows, such as rows.safetensors"
        raise InvalidArgumentError(msg)


def replaced(target: Any) -> ChangedFileError:
    """Make the error of a new file that another call has replaced before it was opened."""
    name = _name_of(target)
    error = ChangedFileError(f"{printable(name)}: another table was packed into this file meanwhile; give each its own")
    error.filename = name
    return error


def _all_files(table: TableSource) -> list[str]:
    if table.shape is not None or isinstance(table.source, StripeSet):
        return [_name_of(table.source), *parts_of(table.source)]
    paths = [part for file in find_files(table.source, "off") for part in (_name_of(file.path), *parts_of(file.path))]
    source = Path(_name_of(table.source))
    return [*paths, *map(str, source.glob("*.index.json") if source.is_dir() else [source])]


def parts_of(path: str | os.PathLike[str] | StripeSet) -> list[str]:
    """Return the files that hold the bytes of a file: of a stripe set, its parts."""
    if is_stripe_set(text := _name_of(path)) and Path(text).exists():
        return [*StripeSet.from_manifest(text).paths]
    return [text]


def is_stripe_set(path: str) -> bool:
    """Whether a path is that of a manifest."""
    return path.endswith(".stripes.json")


def _name_of(path: str | os.PathLike[str] | StripeSet) -> str:
    return os.fsdecode(path.manifest_path if isinstance(path, StripeSet) else path)


def locate_raw(path: Any, shape: Any, dtype: torch.dtype, offset: int) -> Located:
    """Describe rows that follow each other in a file."""
    if not isinstance(shape, list | tuple) or not shape:
        msg = f"shape is {shown(shape)}; it must have the number of rows, and the shape of a row: (rows, columns)"
        raise TypeError(msg)
    if checked_dtype(dtype) in QUANTISED:
        msg = f"dtype is {dtype}; a table has plain elements: give the dtype of its codes, such as torch.int8"
        raise TypeError(msg)
    rows, *row_shape = (whole(size, "shape") for size in shape)
    row_bytes = math.prod(row_shape) * dtype.itemsize
    if row_bytes == 0:
        msg = f"shape is {tuple(shape)}: its rows have no elements; a table has at least one column"
        raise InvalidArgumentError(msg)
    if rows * row_bytes > WHOLE_MAX:
        msg = f"shape is {tuple(shape)}, which is {rows * row_bytes:,} bytes; no file is as large"
        raise InvalidArgumentError(msg)
    return Located([_kept(path)], [(0, whole(offset, "offset"), rows)], tuple(row_shape), dtype)


def locate_tensors(source: Any, names: list[str], engine: Engine | None) -> Located:
    """Find tensors in the files of a checkpoint. Their rows are one table, in the order of ``names``."""
    request = LoadRequest(path=source, device=torch.device("cpu"), verify="auto", engine=engine)
    return request.for_files(lambda files: _locate(request, files, names))


class _Part(NamedTuple):
    """A tensor of the table."""

    file: _CheckpointReader
    offset: int
    shape: list[int]
    dtype: torch.dtype


def _locate(request: LoadRequest, files: list[SourceFile], names: list[str]) -> Located:
    found: dict[str, _Part] = {}
    listed: list[str] = []
    for file in files:
        if file.names is not None and set(names).isdisjoint(file.names):
            listed += file.names
        else:
            listed += _find_parts(request, file, names, found)
    missing = [name for name in names if name not in found]
    if missing:
        msg = f"{request.name}: no tensor is named {names_text(missing)}; its tensors are: {names_text(sorted(listed))}"
        raise KeyError(msg)
    parts = [found[name] for name in names]
    row_shape, dtype = parts[0].shape[1:], parts[0].dtype
    for name, part in zip(names, parts, strict=True):
        if (part.shape[1:], part.dtype) != (row_shape, dtype):
            msg = (
                f"{request.name}: the rows of {name} are {part.dtype} of shape {tuple(part.shape[1:])}, and those of "
                f"{names[0]} are {dtype} of {tuple(row_shape)}; a table has rows of one kind"
            )
            raise InvalidArgumentError(msg)
    if math.prod(row_shape) == 0:
        msg = f"{request.name}: the rows of {names[0]} have no elements; a table has at least one column"
        raise InvalidArgumentError(msg)
    readers = [*{id(part.file): part.file for part in parts}.values()]
    numbers = {id(reader): number for number, reader in enumerate(readers)}
    ranges = [(numbers[id(part.file)], part.offset, part.shape[0]) for part in parts]
    return Located(readers, ranges, tuple(row_shape), dtype)


def _find_parts(request: LoadRequest, file: SourceFile, names: list[str], found: dict[str, _Part]) -> list[str]:
    """Find tensors in a file. Returns the names of all tensors there."""
    reader = request.open(file, headers="read")
    entries, storages = tensor_entries(reader), storage_entries(reader)
    signed = {number for number, *signs in reader.signs() if any(signs)}
    for number, entry in enumerate(entries):
        if entry.name not in names:
            continue
        if number in signed:
            msg = f"{file.path}: {entry.name} is a lazy conjugate or negative; save it resolved"
            raise UnsupportedError(msg)
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not entry.shape or dtype in QUANTISED:
            msg = f"{file.path}: {entry.name} is {dtype} of shape {tuple(entry.shape)}, which is no table of plain rows"
            raise UnsupportedError(msg)
        if entry.strides != row_major(entry.shape):
            msg = f"{file.path}: {entry.name} has no contiguous rows; save it with .contiguous()"
            raise UnsupportedError(msg)
        offset = storages[entry.storage].offset + entry.storage_offset * dtype.itemsize
        found[entry.name] = _Part(reader, offset, entry.shape, dtype)
    return [entry.name for entry in entries]


def row_major(shape: list[int]) -> list[int]:
    """Return the strides of contiguous rows."""
    return [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]


def _kept(path: Any) -> Any:
    if isinstance(path, StripeSet | str | bytes | os.PathLike):
        return path
    msg = f"a table is opened by a path or a StripeSet, not by {shown(path)}"
    raise TypeError(msg)


def check_described(dtype: object, shape: object) -> bool:
    """Whether the file is raw, which takes both a shape and a dtype."""
    if (dtype is None) != (shape is None):
        msg = "a raw file needs both shape and dtype; a checkpoint file has them, and needs the name of a tensor"
        raise InvalidArgumentError(msg)
    return dtype is not None


def check_names(tensor: object) -> list[str]:
    """Return the names of tensors, in order."""
    names = [tensor] if isinstance(tensor, str) else tensor
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        msg = f"tensor is {shown(tensor)}; give the name of a tensor, or a list of names in the order of their rows"
        raise TypeError(msg)
    if len(set(names)) < len(names):
        msg = "tensor names a tensor twice; name each once, in the order of their rows"
        raise InvalidArgumentError(msg)
    return [*names]


def _check_scales(rows: Located, scales: Located) -> Located:
    """Return scales that fit the rows."""
    columns, groups = math.prod(rows.row_shape), math.prod(scales.row_shape)
    if rows.dtype not in CONVERTED or scales.dtype not in SCALES:
        msg = (
            f"rows of {rows.dtype} cannot have scales of {scales.dtype}; rows with scales are float8, int8, bfloat16, "
            "float16 or float32, and scales are bfloat16, float16, float32 or float8_e8m0fnu"
        )
        raise TypeError(msg)
    if scales.rows != rows.rows or columns % groups:
        msg = (
            f"there are {scales.rows} rows of {groups} scales, and {rows.rows} rows of {columns} columns; each row "
            "needs one scale, or one for each of some equal groups of columns"
        )
        raise InvalidArgumentError(msg)
    return scales


def list_tables(source: str) -> list[dict[str, Any]]:
    """List the tensors that can be a table, the largest first."""
    request = LoadRequest(path=source, device=torch.device("cpu"), verify="auto")
    found = request.for_files(lambda files: [table for file in files for table in _tables_of(request, file)])
    return sorted(found, key=lambda table: (-table["bytes"], table["name"]))


def _tables_of(request: LoadRequest, file: SourceFile) -> list[dict[str, Any]]:
    reader = request.open(file)
    signed = {number for number, *signs in reader.signs() if any(signs)}
    tables = []
    for number, entry in enumerate(tensor_entries(reader)):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        is_plain = dtype not in QUANTISED and number not in signed and entry.strides == row_major(entry.shape)
        is_listed = file.names is None or entry.name in file.names
        if not is_listed or not is_plain or len(entry.shape) < _DIMENSIONS_MIN or 0 in entry.shape:
            continue
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        size = {"row_bytes": row_bytes, "bytes": entry.shape[0] * row_bytes}
        tables.append({"name": entry.name, "shape": entry.shape, "dtype": entry.dtype, **size})
    return tables
