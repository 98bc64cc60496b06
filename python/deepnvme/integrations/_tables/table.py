"""A table of a model whose rows stay in the files of its checkpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from deepnvme._rows.row_store import RowStore
from deepnvme.errors import InvalidArgumentError, UnsupportedError
from deepnvme.integrations._tables.mapped import find_file
from deepnvme.integrations._tables.settings import MEMORY, TableSettings

if TYPE_CHECKING:
    from deepnvme._rows.gather import Gather

_log = logging.getLogger(__name__)


class TableGroup:
    """Tables that share the memory of one setting: those of a model.

    A model builds all its tables before it loads the first one. Tables that are built later, such as those of a draft
    model, are another group.
    """

    _open: TableGroup | None = None

    def __init__(self) -> None:
        self._memory = TableSettings.from_environment().memory
        self.nbytes = 0
        """Bytes of all its tables."""

    @classmethod
    def join(cls, nbytes: int) -> TableGroup:
        """Add a table of this size to the group that is being built."""
        group = cls._open = cls._open or cls()
        group.nbytes += nbytes
        return group

    def reserve(self, nbytes: int) -> bool:
        """Take memory for a tensor that is used with each row. Return whether half of the memory still had room."""
        if nbytes > self._memory // 2:
            return False
        self._memory -= nbytes
        return True

    def share(self, nbytes: int) -> int:
        """Return the memory of a table of this size. The group takes no more tables."""
        if TableGroup._open is self:
            TableGroup._open = None
        return self._memory * nbytes // self.nbytes


class _Part:
    """Rows of the table that follow each other in a file."""

    def __init__(self, first: int, rows: int, path: str, offset: int) -> None:
        self.first, self.rows, self.path, self.offset = first, rows, path, offset

    @property
    def end(self) -> int:
        return self.first + self.rows

    def place(self) -> tuple[int, int, str, int]:
        return self.first, self.rows, self.path, self.offset


class DiskTable:
    """A table whose rows are in files. First its places are recorded, and then rows are looked up.

    Args:
        name: name for messages.
        shape: rows of this rank, including those of padding, and elements of a row.
        dtype: dtype of looked up rows, that of the model's parameter.
        used_rows: rows before the padding, which reads as zeros. Default: all.
    """

    def __init__(
        self, name: str, shape: tuple[int, int] | torch.Size, dtype: torch.dtype, *, used_rows: int | None = None
    ) -> None:
        self.name, self.dtype = name, dtype
        self.rows, self.columns = shape
        self.used_rows = self.rows if used_rows is None else used_rows
        self._stored_dtype: torch.dtype | None = None
        self._parts: list[_Part] = []
        self._store: RowStore | None = None
        self._group = TableGroup.join(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in the model's dtype."""
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def group(self) -> TableGroup:
        """The tables that it shares memory with."""
        return self._group

    def change_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of looked up rows, before any is recorded.

        Raises:
            UnsupportedError: rows were recorded.
        """
        if self._parts and dtype != self.dtype:
            msg = f"{self.name}: its rows are {self.dtype}, and cannot become {dtype}; {_RESTART}"
            raise UnsupportedError(msg)
        self.dtype = dtype

    def record(self, first: int, source: torch.Tensor) -> None:
        """Record where rows are, instead of copying them.

        Args:
            first: number of the first row.
            source: the rows: a tensor that is mapped from a file.

        Raises:
            UnsupportedError: they are not mapped, have another shape, or the table is in use already.
        """
        rows = source.shape[0] if source.ndim else 0
        if source.ndim != 2 or source.shape[1] != self.columns or first + rows > self.rows:  # noqa: PLR2004
            msg = f"{self.name}: a tensor of shape {tuple(source.shape)} is no part of ({self.rows}, {self.columns})"
            raise UnsupportedError(msg)
        # Padding is never looked up.
        rows = min(rows, self.used_rows - first)
        if rows <= 0:
            return
        source = source[:rows]
        place = find_file(source, self.name)
        part = _Part(first, rows, place.path, place.offset)
        if any(known.place() == part.place() for known in self._parts):
            return
        if self._store is not None or any(part.first < known.end and known.first < part.end for known in self._parts):
            msg = f"{self.name}: its rows are read from {place.path}, and cannot be changed; {_RESTART}"
            raise UnsupportedError(msg)
        if self._stored_dtype not in {None, source.dtype}:
            msg = f"{self.name}: its parts are {self._stored_dtype} and {source.dtype}; a table has rows of one dtype"
            raise UnsupportedError(msg)
        self._stored_dtype = source.dtype
        self._parts.append(part)
        if sum(known.rows for known in self._parts) == self.used_rows:
            # Here, rather than at the first look-up, so that wrong settings stop the server while it loads.
            self.store()

    def clear(self, first: int, rows: int) -> None:
        """Accept that padding is filled with zeros.

        Raises:
            UnsupportedError: these rows are no padding.
        """
        if rows and first < self.used_rows:
            msg = f"{self.name}: its rows are on disk, and cannot be filled; {_RESTART}"
            raise UnsupportedError(msg)

    def store(self) -> RowStore:
        """Return the open table.

        Raises:
            UnsupportedError: rows were not loaded, or have a dtype that cannot be converted.
            ValueError: the memory is too little.
        """
        if self._store is None:
            self._store = self._opened()
        return self._store

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows, on the device of the ids.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            IndexError, OSError: as :meth:`deepnvme.RowStore.gather`.
        """
        return self.start(ids).finish()

    def start(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> PendingRows:
        """Start reading rows.

        Args:
            ids: numbers of rows, in any shape.
            out: a contiguous tensor for them. Default: a new one on the device of the ids.

        Raises:
            RuntimeError, IndexError, OSError: as :meth:`gather`.
        """
        refuse_capture(self.name, ids.device)
        if out is None:
            out = torch.empty(*ids.shape, self.columns, dtype=self.dtype, device=ids.device)
        numbers = ids.detach().cpu()
        padding = None
        if self.used_rows < self.rows:
            padding = (numbers >= self.used_rows) & (numbers < self.rows)
            padding = padding if bool(padding.any()) else None
        if padding is not None:
            if self.used_rows == 0:
                return PendingRows(None, out.zero_(), None)
            numbers = numbers.masked_fill(padding, 0)
        if numbers.numel() == 0:
            return PendingRows(None, out, None)
        return PendingRows(self.store().start_gather(numbers, out=out), out, padding)

    def _opened(self) -> RowStore:
        parts = sorted(self._parts, key=lambda part: part.first)
        expected = 0
        for part in parts:
            if part.first != expected:
                break
            expected = part.end
        if expected < self.used_rows:
            msg = (
                f"{self.name}: row {expected} of {self.used_rows} was not loaded; the model's files lack a part of the "
                "table, or its load format has no files (dummy)"
            )
            raise UnsupportedError(msg)
        assert self._stored_dtype is not None
        paths = list(dict.fromkeys(part.path for part in parts))
        ranges = [(paths.index(part.path), part.offset, part.rows) for part in parts]
        memory = self._group.share(self.nbytes)
        try:
            store = RowStore._of_ranges(paths, ranges, (self.columns,), self._stored_dtype, memory)  # noqa: SLF001
        except InvalidArgumentError as error:
            msg = f"{MEMORY}: the share of {self.name} is {memory} bytes: {error}"
            raise InvalidArgumentError(msg) from error
        if self._stored_dtype != self.dtype:
            _check_conversion(store, self.name, self.dtype)
        _log.info(
            "deepnvme: %s: %d rows, %.2f GB in %d files, are read from disk through %.3f GB of memory",
            self.name, self.used_rows, self.used_rows * self.columns * self._stored_dtype.itemsize / 1e9, len(paths),
            memory / 1e9,
        )  # fmt: skip
        return store


class PendingRows:
    """Rows that are being read."""

    def __init__(self, gather: Gather | None, out: torch.Tensor, padding: torch.Tensor | None) -> None:
        self._gather, self._out, self._padding = gather, out, padding

    def finish(self) -> torch.Tensor:
        """Wait for the rows, and return them."""
        if self._gather is not None:
            self._gather.result()
            self._gather = None
            if self._padding is not None:
                # Bytes, because torch cannot fill all dtypes. Zeros of all dtypes are bytes of zeros.
                bits = self._out.view(torch.uint8)
                bits.masked_fill_(self._padding.unsqueeze(-1).to(bits.device), 0)
        return use_on_current_stream(self._out)


_RESTART = "start the server again to serve other weights"


def use_on_current_stream(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a tensor's memory until the current stream has used it: the look-up may have begun on another stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def refuse_capture(name: str, device: torch.device) -> None:
    """Refuse a look-up that a CUDA graph would replay without reading.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        msg = (
            f"{name}: rows that are on disk cannot be looked up inside a CUDA graph, which reads no files; start vLLM "
            "with VLLM_USE_BREAKABLE_CUDAGRAPH=1 or --enforce-eager, and SGLang with --disable-cuda-graph"
        )
        raise RuntimeError(msg)


def _check_conversion(store: RowStore, name: str, dtype: torch.dtype) -> None:
    """Look nothing up, to see whether the rows can be converted."""
    try:
        store.gather([], dtype=dtype)
    except TypeError as error:
        msg = f"{name}: its rows are {store.dtype} in the checkpoint, and {dtype} in the model: {error}"
        raise UnsupportedError(msg) from error
