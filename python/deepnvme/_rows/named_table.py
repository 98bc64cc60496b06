"""A table that a command line names: its options, the byte range of its rows for fio and mmap, its description."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._checkpoint.load_request import LoadRequest, find_files
from deepnvme._rows.locate import Located, check_names, is_stripe_set, locate_raw, locate_tensors, parts_of
from deepnvme._rows.packed import Packed, locate_packed
from deepnvme._rows.row_store import RowStore
from deepnvme._utils.terminal import printable
from deepnvme.errors import CorruptFileError, Error, InvalidArgumentError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_PAGE_BYTES = 4096
# The units of the other commands, such as `deepnvme inspect`.
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20))


class NamedTable(NamedTuple):
    """A table, as the options of a command describe it."""

    source: str
    tensor: list[str] | None
    scales: list[str] | None
    shape: list[int] | None
    dtype: torch.dtype | None
    offset: int

    @classmethod
    def parse(cls, options: dict[str, Any], if_packed: str = "leave --tensor out") -> NamedTable:
        """Read the options. A packed table needs no name, and has no other tensors.

        Args:
            options: the options of the command.
            if_packed: the remedy for a tensor of a packed table.

        Raises:
            NotFoundError: there is no such file.
            InvalidArgumentError: a tensor of a packed table is named.
        """
        table = cls(
            options["source"],
            options["tensor"] or None,
            options["scales"] or None,
            options["shape"] or None,
            getattr(torch, options["dtype"]) if options["dtype"] else None,
            options["offset"] or 0,
        )
        if not Path(table.source).exists():
            msg = f"{table.source}: there is no such file; name a checkpoint, a model folder, or a raw file"
            raise NotFoundError(msg)
        if table.tensor is not None and table.packed() is not None:
            msg = f"{table.source} is a packed table, with its scales; {if_packed}"
            raise InvalidArgumentError(msg)
        return table

    @property
    def arguments(self) -> str:
        """The arguments that name this table to another command."""
        words = [as_argument(self.source)]
        for option, names in (("--tensor", self.tensor), ("--scales", self.scales)):
            for name in names or ():
                # The value of an option may begin with a dash only if it is in the same word.
                words += [f"{option}={name}"] if name.startswith("-") else [option, name]
        if self.shape is not None:
            words += ["--shape", ",".join(map(str, self.shape)), "--dtype", str(self.dtype).removeprefix("torch.")]
        if self.offset:
            words += ["--offset", str(self.offset)]
        return shlex.join(words)

    def packed(self) -> Packed | None:
        """Return the packed table; ``None`` if the file is raw, or a checkpoint of other tensors."""
        if self.shape is not None:
            return None
        _check_checkpoint(self.source)
        try:
            return locate_packed(self.source, None)
        except InvalidArgumentError:
            return None

    def open(self, memory: int) -> RowStore:
        """Open the table with memory of this many bytes."""
        with usage_errors():
            return RowStore(self.source, self.tensor, memory=memory, **self._options())

    def create(self, target: str, memory: int, trace: torch.Tensor | None) -> RowStore:
        """Pack the table into a new file, and open that."""
        with usage_errors():
            return RowStore.create(target, self.source, self.tensor, memory=memory, trace=trace, **self._options())

    def located(self) -> Located:
        """Return where the rows of a table that is not packed are."""
        if self.shape is not None:
            assert self.dtype is not None
            return locate_raw(self.source, self.shape, self.dtype, self.offset)
        with usage_errors():
            return locate_tensors(self.source, check_names(self.tensor), None)

    def located_scales(self) -> Located | None:
        """Return where the scales of a table that is not packed are."""
        return None if self.scales is None else locate_tensors(self.source, check_names(self.scales), None)

    def files(self) -> list[str]:
        """Return the files that hold the table and its scales; of a stripe set, its parts."""
        if self.shape is not None:
            return parts_of(self.source)
        named = {*(self.tensor or ()), *(self.scales or ())}
        files = find_files(self.source, "auto")
        chosen = [file.path for file in files if file.names is None or not named.isdisjoint(file.names)]
        return [part for path in chosen for part in parts_of(path)]

    def _options(self) -> dict[str, Any]:
        return {"scales": self.scales, "shape": self.shape, "dtype": self.dtype, "offset": self.offset}


@contextmanager
def usage_errors() -> Iterator[None]:
    """Raise the errors about names and dtypes as those of a command."""
    try:
        yield
    except KeyError as error:
        raise Error(str(error.args[0])) from error
    except (TypeError, IndexError) as error:
        raise InvalidArgumentError(str(error)) from error


def is_striped(table: NamedTable) -> bool:
    """Whether the table is on a stripe set."""
    return is_stripe_set(table.source)


def _check_checkpoint(source: str) -> None:
    request = LoadRequest(path=source, device=torch.device("cpu"), verify="auto")
    try:
        request.for_files(lambda files: request.open(files[0]))
    except (CorruptFileError, UnsupportedError) as error:
        msg = f"{error}. For a raw file, give --shape and --dtype"
        raise type(error)(msg) from error


def as_argument(path: str) -> str:
    """Return a path that is not taken for an option."""
    return f"./{path}" if path.startswith("-") else path


class Region(NamedTuple):
    """Whole pages of a file, the last one perhaps in part."""

    path: str
    offset: int
    nbytes: int
    read_bytes: int
    """Bytes that a direct read of one row takes at least."""
    first_row: int | None
    """Offset of the first row, if all rows are in place and follow each other."""


def find_region(table: NamedTable) -> Region | str:
    """Return the region of a table; or a sentence that says why there is none."""
    if is_striped(table):
        return "the table is on a stripe set"
    packed = table.packed()
    rows = packed.rows if packed is not None else table.located()
    if len(rows.files) > 1:
        return "the table is in several files"
    path = table.files()[0]
    if packed is not None:
        _, offset, number = rows.ranges[0]
        nbytes = -(-number // packed.rows_per_block) * packed.block_bytes
        return Region(path, offset, nbytes, packed.block_bytes, None)
    start = min(offset for _, offset, _ in rows.ranges)
    end = max(offset + number * rows.row_bytes for _, offset, number in rows.ranges)
    page = start // _PAGE_BYTES * _PAGE_BYTES
    read_bytes = -(-rows.row_bytes // _PAGE_BYTES) * _PAGE_BYTES
    return Region(path, page, end - page, read_bytes, start if len(rows.ranges) == 1 else None)


def labelled(label: str, text: str) -> str:
    """Return a line that begins with its label."""
    return f"{label:<10}{printable(text)}"


def size_text(nbytes: int) -> str:
    """Return a number of bytes in the unit that suits it; below a MiB, the bytes."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:,} byte{'' if nbytes == 1 else 's'}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape, such as ``50000 x 160``."""
    return " x ".join(map(str, shape))


def row_text(shape: Sequence[int], dtype: str) -> str:
    """Return the shape and the dtype of a row, such as ``160 bfloat16``."""
    return f"{shape_text(shape)} {dtype}" if shape else dtype
