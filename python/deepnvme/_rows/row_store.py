"""``RowStore``: rows of a table on disk. The extension reads and caches them; dtypes and shapes are handled here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme._deepnvme import _pack_rows, _RowStore
from deepnvme._rows.gather import Gather, RowFormat, check_ids, gather_target
from deepnvme._rows.locate import SCALES, Located, TableSource, locate_table, refuse_as_target, replaced
from deepnvme._rows.packed import describe, hot_rows, locate_packed
from deepnvme._utils.devices import relaxed_capture_for
from deepnvme._utils.public import check_engine, parse_bytes, public, shown
from deepnvme._utils.terminal import ProgressArgument, progress_callback
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Protocol

    from typing_extensions import Self

    from deepnvme._deepnvme import Engine, StripeSet

    class _Array(Protocol):
        """An array of any library, such as NumPy."""

        def __array__(self, *arguments: Any, **options: Any) -> Any: ...


# A deadline beyond this is no deadline.
_SECONDS_MAX = 1e9


@public
class RowStore:
    """Read rows of a table on disk, in any order, and cache frequently used rows in memory.

    It is for tables larger than memory, of which a few rows are used at a time: embeddings, features of a graph,
    vectors of a search index. Rows are read in place. Rows that are adjacent on disk are read together, and a repeated
    row is read once. With direct I/O, rows bypass the page cache. All methods are thread-safe, and a ``with`` block
    closes the table.

    Args:
        source: the file: safetensors, a torch archive, a model's folder or index, a :class:`StripeSet`, a raw file, or
            a table that :meth:`create` has packed.
        tensor: the name of the table, required for a checkpoint file. A list of names, for a table in several tensors,
            in the order of their rows. The first dimension of each tensor is its rows.
        memory: bytes for cached rows with their index, for reads in flight, and for scales, such as ``"2GB"``. Gathers
            into GPU tensors take 8 MiB of pinned memory in addition, or sixteen times the size of a row if that is
            more.
        scales: the name of a tensor with the scales of quantised rows, or several in order. Its shape is ``(rows,)`` or
            ``(rows, groups)``: one scale for each row, or for each equal group of a row's columns. Its dtype is
            bfloat16, float16, float32 or ``float8_e8m0fnu``; that of the rows is float8, int8, bfloat16, float16 or
            float32. All scales are kept in memory, except those of a packed table. Default: none.
        shape: the shape of the table, such as ``(rows, columns)``; required for a raw file, and not allowed otherwise.
        dtype: the dtype of its elements; required for a raw file, and not allowed otherwise.
        offset: for a raw file, bytes before the first row. Default 0.
        engine: the engine to use. Default: the default engine.

    Raises:
        OSError: the file cannot be opened.
        KeyError: the file has no such tensor.
        TypeError: an argument has the wrong type, or rows of this dtype cannot have scales.
        ValueError: ``memory`` is too little for one row; the message states the minimum. Or ``tensor`` is missing. Or
            tensors of the list differ in dtype, or in the shape of their rows.
        UnsupportedError: the tensor has no contiguous rows, or is quantised. Or a later version of deepnvme packed the
            table.
        CorruptFileError: the description of a packed table is damaged.
        EndOfFileError: the raw file is shorter than ``shape`` says.

    Example:
        >>> size = deepnvme.save({"table": torch.arange(40.0).reshape(10, 4)}, "model.safetensors")
        >>> table = deepnvme.RowStore("model.safetensors", "table", memory="1MB")
        >>> table
        RowStore(10 rows of (4,), torch.float32)
        >>> table.gather(torch.tensor([[7], [0]]))
        tensor([[[28., 29., 30., 31.]],
        <BLANKLINE>
                [[ 0.,  1.,  2.,  3.]]])
        >>> table.close()
    """

    def __init__(
        self,
        source: str | bytes | os.PathLike[str] | StripeSet,
        tensor: str | Sequence[str] | None = None,
        *,
        memory: int | str,
        scales: str | Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        offset: int = 0,
        engine: Engine | None = None,
    ) -> None:
        nbytes = parse_bytes(memory)
        check_engine(engine)
        if tensor is None and scales is None and dtype is None and shape is None:
            packed = locate_packed(source, engine)
            described = packed.rows
            behind_rows = None
            if packed.scales is not None:
                kind, count = packed.scales
                behind_rows = (count, described.row_bytes), SCALES[kind]
            self._store = _RowStore(described.files, packed.source, behind_rows, nbytes, engine)
            self._id = packed.id
            has_scales, self._first_rows = packed.scales is not None, packed.first_rows
        else:
            described, scale_table = locate_table(TableSource(source, tensor, scales, shape, dtype, offset, engine))
            files = [*described.files, *(scale_table.files if scale_table else ())]
            behind = len(described.files)
            argument = None if scale_table is None else (scale_table.behind(behind), SCALES[scale_table.dtype])
            self._store = _RowStore(files, described.behind(0), argument, nbytes, engine)
            has_scales, self._first_rows = scale_table is not None, described.first_rows
        self._describe(described, has_scales=has_scales)

    @classmethod
    def _of_ranges(
        cls,
        paths: Sequence[str],
        ranges: list[tuple[int, int, int]],
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        memory: int,
    ) -> Self:
        """Open a table by the place of each of its parts: number of the file, offset in bytes, rows."""
        self = cls.__new__(cls)
        rows = Located([*paths], ranges, row_shape, dtype)
        self._store = _RowStore(rows.files, rows.behind(0), None, memory, None)
        self._first_rows = rows.first_rows
        self._describe(rows, has_scales=False)
        return self

    def _describe(self, rows: Located, *, has_scales: bool) -> None:
        self._format, self._rows = RowFormat(rows.row_shape, rows.dtype, has_scales), rows.rows
        self._is_closed = False

    @classmethod
    def create(
        cls,
        path: str | bytes | os.PathLike[str] | StripeSet,
        source: str | bytes | os.PathLike[str] | StripeSet,
        tensor: str | Sequence[str] | None = None,
        *,
        memory: int | str,
        scales: str | Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        offset: int = 0,
        trace: torch.Tensor | _Array | Sequence[int] | None = None,
        progress: ProgressArgument = None,
        engine: Engine | None = None,
    ) -> Self:
        """Pack a table into a new file, and open that.

        No row of a packed table crosses a block, and its scales lie behind it, so that a row takes one read: of the
        pages that its size needs, or of one more. Each block has a checksum, which every read compares. The file is
        replaced atomically. It is a safetensors file with a tensor of bytes, of at most one and a half times the size
        of rows and scales, plus a few KiB. Hot rows add up to an eighth.

        Args:
            path: the file to write. One that exists is replaced, unless it is a file of ``source``.
            source: the table, as in :class:`RowStore`.
            tensor: as in :class:`RowStore`.
            memory: as in :class:`RowStore`. If rows fill whole pages, the checksums of their blocks take 4 bytes
                of it for each block. Packing itself takes at most 16 MiB; 32 MiB with ``scales`` and ``trace``; or
                eight times the size of a row if that is more. The ids of ``trace`` and the engine's bounce buffers come
                on top.
            scales: as in :class:`RowStore`.
            shape: as in :class:`RowStore`.
            dtype: as in :class:`RowStore`.
            offset: as in :class:`RowStore`.
            trace: a trace of ids: those that were requested before, in the order of the requests, in any integer dtype
                and shape. The hot rows, which are the most frequent ones, are copied together behind the table, in the
                order in which they occur first: those that occur more than once, up to an eighth of the table. Gathers
                read the copies. Rows that are requested together then take fewer reads. Each copy needs up to 9 bytes
                of ``memory``. Default: no copies.
            progress: a progress bar on a terminal (``None``, the default), always (True) or never (False); or a
                function of bytes so far and bytes in all.
            engine: as in :class:`RowStore`.

        Returns:
            The packed table.

        Raises:
            ChangedFileError: the source was changed meanwhile, or another program replaced the new file.
            InvalidArgumentError: ``path`` is a file of ``source``, or the name of an index or a manifest.
            IndexError: an id of the trace is out of range.
            OSError, KeyError, TypeError, ValueError, UnsupportedError: as in :class:`RowStore`; or the file cannot be
                written.

        Example:
            >>> size = deepnvme.save({"table": torch.arange(40.0).reshape(10, 4)}, "model.safetensors")
            >>> table = deepnvme.RowStore.create("rows.safetensors", "model.safetensors", "table", memory="1MB")
            >>> table.gather([9])
            tensor([[36., 37., 38., 39.]])
            >>> deepnvme.RowStore("rows.safetensors", memory="1MB")
            RowStore(10 rows of (4,), torch.float32)
        """
        check_engine(engine)
        table = TableSource(source, tensor, scales, shape, dtype, offset, engine)
        rows, scale_table = locate_table(table)
        refuse_as_target(path, table)
        files = [*rows.files, *(scale_table.files if scale_table else ())]
        hot = [] if trace is None else hot_rows(check_ids(trace)[0], rows.rows)
        report = progress_callback(progress, "packing", path)
        total = rows.rows * rows.row_bytes
        number = _pack_rows(
            files,
            rows.behind(0),
            None if scale_table is None else scale_table.behind(len(rows.files)),
            hot,
            describe(rows, scale_table),
            parse_bytes(memory),
            path,
            None if report is None else lambda done: report(done * rows.row_bytes, total),
            engine,
        )
        if report is not None:
            report(total, total)
        made = cls(path, memory=memory, engine=engine)
        if made._id != number:
            made.close()
            raise replaced(path)
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table; the first size is its number of rows."""
        return (self._rows, *self._format.shape)

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The first row of each tensor of the table, in their order.

        Several tables with rows of one kind can be one ``RowStore``, and their rows are read together:

        >>> state = {"a": torch.zeros(10, 4), "b": torch.ones(10, 4)}
        >>> size = deepnvme.save(state, "tables.safetensors")
        >>> tables = deepnvme.RowStore("tables.safetensors", ["a", "b"], memory="1MB")
        >>> first_of_a, first_of_b = tables.first_rows
        >>> ids = torch.tensor([3, 7])
        >>> rows_of_a, rows_of_b = tables.gather(torch.stack([ids + first_of_a, ids + first_of_b]))
        >>> rows_of_b
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.]])
        """
        return self._first_rows

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements on disk."""
        return self._format.dtype

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of gathered rows unless a call names another: float32 for a table with scales, else the table's."""
        return self._format.gathered_dtype

    def __len__(self) -> int:
        return self._rows

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def gather(
        self,
        ids: torch.Tensor | _Array | Sequence[int],
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return rows, in the order of ``ids``.

        Args:
            ids: row numbers, starting at 0: a tensor or an array of any integer dtype and shape, or a list.
            out: a contiguous tensor for the rows, on the CPU or on a GPU. Default: a new one on the CPU.
            dtype: the dtype of the result. Default: that of ``out``; without ``out``, :attr:`gathered_dtype`. Tables of
                bfloat16, float16, float32, float8 and int8 can be converted to bfloat16, float16 and float32.
            scale: one number by which every element is multiplied. The product is computed in float32, and rounded to
                ``dtype``. Default: none.

        Returns:
            A tensor of the shape ``ids.shape + table.shape[1:]``.

        Raises:
            IndexError: an id is out of range; the message names it and its position.
            TypeError: ids are not integers, or the dtypes cannot be converted.
            ValueError: ``out`` has another shape, or is not contiguous.
            ChangedFileError: the file was replaced, or written to, since it was opened.
            ClosedError: the table is closed, or was opened in the parent of this forked process.
            ChecksumError: a block of a packed table is damaged.
            OSError: a read failed.

        Example:
            >>> deepnvme.write(torch.arange(12.0), "rows.bin")
            48
            >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
            >>> table.gather([3, 1], dtype=torch.bfloat16, scale=0.5)
            tensor([[4.5000, 5.0000, 5.5000],
                    [1.5000, 2.0000, 2.5000]], dtype=torch.bfloat16)
        """
        numbers, kind = check_ids(ids)
        target, conversion = gather_target(self._format, numbers, out, dtype, scale)
        with relaxed_capture_for(target.device):
            self._store.gather((numbers, kind, target.detach(), conversion))
        return target

    def start_gather(
        self,
        ids: torch.Tensor | _Array | Sequence[int],
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
    ) -> Gather:
        """Gather rows in the background. The call returns once the first reads are in flight.

        Args:
            ids: as in :meth:`gather`. They are copied, so the tensor may change.
            out: as in :meth:`gather`. Don't use it until the gather is done.
            dtype: as in :meth:`gather`.
            scale: as in :meth:`gather`.

        Returns:
            The gather in flight. Its ``result()`` returns the tensor.

        Raises:
            IndexError, TypeError, ValueError, ClosedError: as in :meth:`gather`. All other errors are raised by
                ``result``.

        Example:
            >>> deepnvme.write(torch.arange(12.0), "rows.bin")
            48
            >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
            >>> gather = table.start_gather([1, 1], out=torch.empty(2, 3))
            >>> gather.result()
            tensor([[3., 4., 5.],
                    [3., 4., 5.]])
        """
        numbers, kind = check_ids(ids)
        target, conversion = gather_target(self._format, numbers, out, dtype, scale)
        with relaxed_capture_for(target.device):
            return Gather(self._store.start_gather((numbers, kind, target.detach(), conversion)), target)

    def prefetch(self, ids: torch.Tensor | _Array | Sequence[int], *, deadline_s: float | None = None) -> None:
        """Read rows into memory in the background, so that a later gather finds them there.

        Gathers have priority: a prefetch uses only disk and buffer capacity that gathers leave free. A gather that
        needs a row that is on its way waits for that read. Prefetches in flight are limited to half of the cache;
        further rows are skipped. A failed read raises no error here; a later gather of the row does.

        Args:
            ids: as in :meth:`gather`.
            deadline_s: seconds from now after which no new read starts. Default: no limit.

        Raises:
            IndexError, TypeError, ClosedError: as in :meth:`gather`.
            ValueError: ``deadline_s`` is negative or not a number.

        Example:
            >>> deepnvme.write(torch.arange(12.0), "rows.bin")
            48
            >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
            >>> table.prefetch([0, 2], deadline_s=0.5)
        """
        given: object = deadline_s
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if given is not None and not (is_number and 0 <= given <= _SECONDS_MAX):  # type: ignore[operator]
            msg = f"deadline_s is {shown(deadline_s)}; it must be a number of seconds, from 0 on"
            raise InvalidArgumentError(msg)
        self._store.prefetch(*check_ids(ids), deadline_s)

    def keep(self, ids: torch.Tensor | _Array | Sequence[int]) -> None:
        """Read rows into memory, wait for them, and never evict them while the table is open.

        All rows that are kept may fill at most half of the cache.

        Args:
            ids: as in :meth:`gather`.

        Raises:
            ValueError: there are more rows than fit; the message states how many still fit.
            IndexError, TypeError, ChangedFileError, ClosedError, OSError: as in :meth:`gather`.

        Example:
            >>> deepnvme.write(torch.arange(12.0), "rows.bin")
            48
            >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
            >>> table.keep([0, 1])
        """
        self._store.keep(*check_ids(ids))

    def verify(self) -> int:
        """Read a whole packed table, and compare every block with its checksum.

        Returns:
            The number of blocks.

        Raises:
            ChecksumError: a block is damaged; the message names its rows.
            ValueError: the table is not packed. Rows that are read in place have no checksums.
            ChangedFileError, ClosedError, OSError: as in :meth:`gather`.

        Example:
            >>> size = deepnvme.save({"table": torch.arange(40.0).reshape(10, 4)}, "model.safetensors")
            >>> deepnvme.RowStore.create("rows.safetensors", "model.safetensors", "table", memory="1MB").verify()
            1
        """
        return self._store.verify()

    def stats(self) -> RowStats:
        """Return the counters so far.

        Raises:
            ClosedError: the table was opened in the parent of this forked process.
        """
        return RowStats(**self._store.stats())

    def close(self) -> None:
        """Refuse further reads. Gathers in flight finish, and prefetches stop. Calling it again does nothing."""
        self._is_closed = True
        self._store.close()

    def __reduce__(self) -> NoReturn:
        msg = "a RowStore, an open file with a cache, cannot be copied or pickled; open the table again by its path"
        raise TypeError(msg)

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, _memo: object) -> NoReturn:
        self.__reduce__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"RowStore({self._rows} rows of {self._format.shape}, {self._format.dtype}{closed})"


@public
@dataclass(frozen=True)
class RowStats:
    """Counters of a :class:`RowStore` since it was opened.

    Attributes:
        rows: rows that callers asked for, repeated ones included.
        hits: of these, rows found in memory. A repeated row that has to be read is no hit, and counts once in
            ``rows_read``; so ``rows`` may exceed the sum of ``hits``, ``rows_read`` and ``rows_shared``.
        rows_read: rows that were read from disk; a row that is read by two gathers counts twice.
        reads: read operations.
        bytes_read: bytes of these operations: whole pages of 4 KiB.
        rows_joined: rows that were read in the same operation as another row.
        rows_shared: rows for which a gather waited, because another gather or a prefetch was reading them.
        rows_prefetched: rows that a prefetch read.
        rows_not_prefetched: rows that prefetches skipped: their deadline had passed, or those in flight were more
            than half of the cache holds.
        memory_bytes: the most bytes that the store uses.
        cached_rows_max: rows that fit into the cache.

    Example:
        >>> deepnvme.write(torch.ones(100, 8), "rows.bin")
        3200
        >>> with deepnvme.RowStore("rows.bin", shape=(100, 8), dtype=torch.float32, memory="1MB") as table:
        ...     rows = table.gather([3, 3, 5])
        ...     stats = table.stats()
        >>> stats.rows, stats.rows_read, stats.reads
        (3, 2, 1)
    """

    rows: int
    hits: int
    rows_read: int
    reads: int
    bytes_read: int
    rows_joined: int
    rows_shared: int
    rows_prefetched: int
    rows_not_prefetched: int
    memory_bytes: int
    cached_rows_max: int
