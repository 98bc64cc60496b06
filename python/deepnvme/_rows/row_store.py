"""``RowStore``: rows of a table on disk. The extension reads and caches them; dtypes and shapes are handled here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import _RowStore
from deepnvme._rows.gather import Gather
from deepnvme._rows.locate import check_described, check_names, locate_raw, locate_tensors
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
        memory: bytes for cached rows with their index, and for reads in flight, such as ``"2GB"``.
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
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        offset: int = 0,
        engine: Engine | None = None,
    ) -> None:
        nbytes = parse_bytes(memory)
        check_engine(engine)
        if check_described(dtype, shape):
            if tensor is not None:
                msg = "tensor names a tensor of a checkpoint file, and shape and dtype describe a raw file: give one"
                raise InvalidArgumentError(msg)
            assert shape is not None
            assert dtype is not None
            located = locate_raw(source, shape, dtype, offset)
        elif tensor is None:
            msg = "tensor is missing: name the tensor of a checkpoint file, or give shape and dtype of a raw file"
            raise InvalidArgumentError(msg)
        else:
            located = locate_tensors(source, check_names(tensor), engine)
        self._row_shape, self._dtype, self._rows = located.row_shape, located.dtype, located.rows
        self._store = _RowStore(located.paths, located.ranges, located.row_bytes, nbytes, engine)
        self._is_closed = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table; the first size is its number of rows."""
        return (self._rows, *self._row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements on disk."""
        return self._dtype

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
            dtype: the dtype of the result. Default: that of ``out``, or of the table. Tables of bfloat16, float16 and
                float32 can be converted to each other.
            scale: a factor for each element. The product is rounded once, to ``dtype``.

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
            out = torch.empty(shape, dtype=self._dtype if dtype is None else checked_dtype(dtype))
        elif tuple(out.shape) != shape or not out.is_contiguous():
            kind = "" if out.is_contiguous() else ", not contiguous"
            msg = f"out has the shape {tuple(out.shape)}{kind}; it must be contiguous, of the shape {shape}"
            raise InvalidArgumentError(msg)
        elif dtype is not None and dtype != out.dtype:
            msg = f"dtype is {dtype}, and out is {out.dtype}; leave dtype out, or give one of that dtype"
            raise TypeError(msg)
        if out.dtype == self._dtype and scale is None:
            return out, None
        if self._dtype not in _FLOATS or out.dtype not in _FLOATS:
            msg = (
                f"rows of {self._dtype} cannot be converted to {out.dtype} or scaled; bfloat16, float16 and float32 "
                "can: gather them as they are, and convert the result"
            )
            raise TypeError(msg)
        return out, (_FLOATS[self._dtype], _FLOATS[out.dtype], None if scale is None else float(scale))


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
