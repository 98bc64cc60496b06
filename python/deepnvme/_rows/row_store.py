"""``RowStore``: rows of a table on disk. The extension reads and caches them; dtypes and shapes are handled here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import _RowStore
from deepnvme._rows.gather import Gather
from deepnvme._rows.locate import Located, check_described, check_names, locate_raw, locate_tensors
from deepnvme._rows.stats import RowStats
from deepnvme._utils.arguments import check_engine, parse_bytes, shown
from deepnvme._utils.capture import relaxed_capture_for
from deepnvme._utils.public import public
from deepnvme._utils.tensors import checked_dtype
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from typing_extensions import Self

    from deepnvme._deepnvme import Engine, StripeSet

_FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# Types that gathers convert to floats.
_CONVERTED = {**_FLOATS, torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2", torch.int8: "int8"}
_SCALES = {**_FLOATS, torch.float8_e8m0fnu: "float8_e8m0fnu"}


@public
class RowStore:
    """Read rows of a table on disk, in any order, and keep rows that are used often in memory.

    It is for tables larger than memory, of which a few rows are used at a time: embeddings, features of a graph, keys
    of a search. Rows are read from where they are. Neighbours are read together, and repeated rows once. The page cache
    is not used. All methods are thread-safe.

    Args:
        source: the file: safetensors, a torch archive, a model's folder or index, a :class:`StripeSet`, or a raw file.
        tensor: the name of the table; a list of names for a table in several tensors, in the order of their rows. The
            first dimension of each counts rows.
        memory: bytes for cached rows with their index, for reads in flight, and for scales, such as ``"2GB"``.
        scales: the name of a tensor with the scales of quantised rows, or several in order. It has one scale for each
            row, or for each of some equal groups of columns, in a float type or ``float8_e8m0fnu``. All are kept in
            memory.
        shape: for a raw file, the shape of the table, such as ``(rows, columns)``.
        dtype: for a raw file, the dtype of its elements.
        offset: for a raw file, bytes before the first row. Default 0.
        engine: the engine to use. Default: the default engine.

    Raises:
        OSError: the file cannot be opened.
        KeyError: the file has no such tensor.
        ValueError: ``memory`` is too little for one row; the message states how much is enough. Or the rows are of
            different kinds.
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
        scale_table = None
        if check_described(dtype, shape):
            if tensor is not None or scales is not None:
                msg = "tensor and scales name tensors of a checkpoint file, and shape and dtype describe a raw file"
                raise InvalidArgumentError(msg)
            assert shape is not None
            assert dtype is not None
            located = locate_raw(source, shape, dtype, offset)
        elif tensor is None:
            msg = "tensor is missing: name the tensor of a checkpoint file, or give shape and dtype of a raw file"
            raise InvalidArgumentError(msg)
        else:
            located = locate_tensors(source, check_names(tensor), engine)
            if scales is not None:
                scale_table = _check_scales(located, locate_tensors(source, check_names(scales), engine))
        self._has_scales = scale_table is not None
        paths = [*dict.fromkeys([*located.paths, *(scale_table.paths if scale_table else ())])]
        self._row_shape, self._dtype, self._rows = located.row_shape, located.dtype, located.rows
        described = None if scale_table is None else (scale_table.in_files(paths), _SCALES[scale_table.dtype])
        self._store = _RowStore(paths, located.in_files(paths), described, nbytes, engine)
        self._is_closed = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table; the first size is its number of rows."""
        return (self._rows, *self._row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements on disk."""
        return self._dtype

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of gathered rows, unless a call names another: float32 for a table with scales, or the table's."""
        return torch.float32 if self._has_scales else self._dtype

    def __len__(self) -> int:
        return self._rows

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def gather(
        self,
        ids: torch.Tensor | Sequence[int],
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return rows, in the order of their ids.

        Args:
            ids: the numbers of the rows, from 0 on: a tensor of any integer dtype and shape, or a list.
            out: a contiguous tensor for the rows, on the CPU or on a GPU. Default: a new one on the CPU.
            dtype: the dtype of the result. Default: that of ``out``, or of the table; float32 for a table with scales.
                Tables of bfloat16, float16, float32, float8 and int8 can be converted to bfloat16, float16 and float32.
            scale: a factor for each element. The product is computed in float32, and rounded to ``dtype``.

        Returns:
            A tensor of the shape ``ids.shape + table.shape[1:]``.

        Raises:
            IndexError: an id is no row; the message names it and its position.
            TypeError: ids are not integers, or the dtypes cannot be converted.
            ValueError: ``out`` has another shape, or is not contiguous.
            ChangedFileError: the file was replaced, or written to, since it was opened.
            ClosedError: the table is closed, or belongs to the process before a fork.
            OSError: a read failed.

        Example:
            >>> deepnvme.write(torch.arange(12.0), "rows.bin")
            48
            >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
            >>> table.gather([3, 1], dtype=torch.bfloat16, scale=0.5)
            tensor([[4.5000, 5.0000, 5.5000],
                    [1.5000, 2.0000, 2.5000]], dtype=torch.bfloat16)
        """
        numbers, kind = _check_ids(ids)
        target, conversion = self._target(numbers, out, dtype, scale)
        with relaxed_capture_for(target.device):
            self._store.gather(numbers, kind, target.detach(), conversion)
        return target

    def start_gather(
        self,
        ids: torch.Tensor | Sequence[int],
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
            The gather in flight. Its ``result`` is the tensor.

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
        numbers, kind = _check_ids(ids)
        target, conversion = self._target(numbers, out, dtype, scale)
        with relaxed_capture_for(target.device):
            return Gather(self._store.start_gather(numbers, kind, target.detach(), conversion), target)

    def prefetch(self, ids: torch.Tensor | Sequence[int], *, deadline_s: float | None = None) -> None:
        """Read rows into memory in the background, so that a later gather finds them there.

        Gathers go first: a prefetch uses what the disk and the buffers have left. A gather that needs a row that is on
        its way waits for that read. Rows beyond half of the cache are left out. Failures are raised by the gather.

        Args:
            ids: as in :meth:`gather`.
            deadline_s: seconds from now after which no read begins any more. Default: no limit.

        Raises:
            IndexError, TypeError, ClosedError: as in :meth:`gather`.
            ValueError: ``deadline_s`` is negative or no number.

        Example:
            >>> deepnvme.write(torch.arange(12.0), "rows.bin")
            48
            >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
            >>> table.prefetch([0, 2], deadline_s=0.5)
        """
        given: object = deadline_s
        if given is not None and not (isinstance(given, int | float) and 0 <= given < math.inf):
            msg = f"deadline_s is {shown(deadline_s)}; it must be a number of seconds, from 0 on"
            raise InvalidArgumentError(msg)
        self._store.prefetch(*_check_ids(ids), deadline_s)

    def pin(self, ids: torch.Tensor | Sequence[int]) -> None:
        """Read rows into memory, and keep them there as long as the table is open. They may be half of the cache.

        Args:
            ids: as in :meth:`gather`.

        Raises:
            ValueError: they are more than fit; the message states how many do.
            IndexError, TypeError, ChangedFileError, ClosedError, OSError: as in :meth:`gather`.

        Example:
            >>> deepnvme.write(torch.arange(12.0), "rows.bin")
            48
            >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
            >>> table.pin([0, 1])
        """
        self._store.pin(*_check_ids(ids))

    def stats(self) -> RowStats:
        """Return the counters so far.

        Raises:
            ClosedError: the table belongs to the process before a fork.
        """
        return RowStats(**self._store.stats())

    def close(self) -> None:
        """Refuse further calls. Gathers in flight finish, and prefetches stop. Calling it again does nothing."""
        self._is_closed = True
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"RowStore({self._rows} rows of {self._row_shape}, {self._dtype}{closed})"

    def _target(
        self, ids: torch.Tensor, out: Any, dtype: torch.dtype | None, scale: float | None
    ) -> tuple[torch.Tensor, tuple[str, str, float | None] | None]:
        """Return the tensor for the rows, and their conversion."""
        shape = (*ids.shape, *self._row_shape)
        if out is not None and not isinstance(out, torch.Tensor):
            msg = f"out must be a torch tensor, not {type(out).__name__}"
            raise TypeError(msg)
        if out is None:
            out = torch.empty(shape, dtype=self.gathered_dtype if dtype is None else checked_dtype(dtype))
        elif tuple(out.shape) != shape or not out.is_contiguous():
            kind = "" if out.is_contiguous() else ", not contiguous"
            msg = f"out has the shape {tuple(out.shape)}{kind}; it must be contiguous, of the shape {shape}"
            raise InvalidArgumentError(msg)
        elif dtype is not None and dtype != out.dtype:
            msg = f"dtype is {dtype}, and out is {out.dtype}; leave dtype out, or give one of that dtype"
            raise TypeError(msg)
        if out.dtype == self._dtype and scale is None and not self._has_scales:
            return out, None
        if self._dtype not in _CONVERTED or out.dtype not in _FLOATS:
            msg = (
                f"rows of {self._dtype} cannot be converted to {out.dtype} or scaled; float and int8 rows can be "
                "converted to bfloat16, float16 and float32: gather them as they are, and convert the result"
            )
            raise TypeError(msg)
        return out, (_CONVERTED[self._dtype], _FLOATS[out.dtype], None if scale is None else float(scale))


def _check_scales(rows: Located, scales: Located) -> Located:
    """Return scales that fit the rows."""
    columns, groups = math.prod(rows.row_shape), math.prod(scales.row_shape)
    if rows.dtype not in _CONVERTED or scales.dtype not in _SCALES:
        msg = f"rows of {rows.dtype} cannot have scales of {scales.dtype}; float8 and int8 rows can have float scales"
        raise TypeError(msg)
    if scales.rows != rows.rows or columns % groups:
        msg = (
            f"there are {scales.rows} rows of {groups} scales, and {rows.rows} rows of {columns} columns; each row "
            "needs one scale, or one for each of some equal groups of columns"
        )
        raise InvalidArgumentError(msg)
    return scales


def _check_ids(ids: Any) -> tuple[torch.Tensor, tuple[bool, int]]:
    """Return ids as a contiguous tensor on the CPU, and whether they are signed, and their bytes."""
    if not isinstance(ids, torch.Tensor):
        # An empty list has no dtype.
        ids = torch.as_tensor(ids) if len(ids) else torch.empty(0, dtype=torch.int64)
    dtype = ids.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        msg = f"ids are {dtype}; they must be integers, such as torch.int64"
        raise TypeError(msg)
    return ids.detach().cpu().contiguous(), (dtype.is_signed, dtype.itemsize)
