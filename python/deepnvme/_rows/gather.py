"""Gathers of rows: the ids and the tensor that a caller gives, and the rows in flight."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._rows.locate import CONVERTED, FLOATS
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.public import public, shown
from deepnvme._utils.tensors import checked_dtype
from deepnvme.errors import InvalidArgumentError, UnsupportedError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Generator

    from deepnvme._deepnvme import _Gather


@public
class Gather:
    """Rows on their way into a tensor, from :meth:`RowStore.start_gather`.

    ``await gather`` waits in a coroutine. Don't use the tensor until the gather is done. Dropping the ``Gather`` does
    not stop the reads.

    Example:
        >>> deepnvme.write(torch.arange(12.0), "rows.bin")
        48
        >>> table = deepnvme.RowStore("rows.bin", shape=(4, 3), dtype=torch.float32, memory="1MB")
        >>> gather = table.start_gather(torch.tensor([2]))
        >>> gather.result()
        tensor([[6., 7., 8.]])
        >>> gather.done()
        True
    """

    def __init__(self, started: _Gather, out: torch.Tensor) -> None:
        self._started, self._out = started, out

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Wait until the gather is done. The call releases the GIL and handles signals (Ctrl-C).

        Args:
            timeout: seconds to wait at most; ``None`` (default) waits without limit.

        Returns:
            The tensor with the rows.

        Raises:
            TimeoutError: the gather is still in flight (``deepnvme.errors.WaitTimeoutError``). It continues: wait
                again, or cancel it.
            ValueError: ``timeout`` is negative, or not a number.
            deepnvme.Error: the gather failed, or was cancelled. Each later call raises it again.
        """
        if not self._started.wait(timeout):
            msg = f"the gather is not done after {timeout} s; wait again, or cancel it"
            raise WaitTimeoutError(msg)
        return self._out

    def done(self) -> bool:
        """Return whether the gather is done: it succeeded, failed or was cancelled. Never blocks."""
        return self._started.is_done()

    def cancel(self) -> None:
        """Stop the gather, unless it is done.

        ``result`` then raises ``deepnvme.errors.CancelledError``, and the contents of the tensor are undefined.
        """
        self._started.cancel()

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        return asyncio.to_thread(self.result).__await__()

    def __repr__(self) -> str:
        return f"<deepnvme.Gather: {tuple(self._out.shape)}, {'done' if self.done() else 'in flight'}>"


def check_ids(ids: Any) -> tuple[torch.Tensor, tuple[bool, int]]:
    """Return ids as a contiguous tensor on the CPU, and whether they are signed, and their bytes."""
    if torch._C._get_tracing_state() is not None:  # noqa: SLF001
        msg = "torch.jit.trace would record this gather without its rows; call the model without tracing it"
        raise UnsupportedError(msg)
    tensor = ids if isinstance(ids, torch.Tensor) else _as_tensor(ids)
    dtype = tensor.dtype
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    if not is_plain or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        msg = f"ids are {dtype}, {tensor.layout}, on {tensor.device}; they must be integers, such as torch.int64"
        raise TypeError(msg)
    return tensor.detach().cpu().contiguous(), (dtype.is_signed, dtype.itemsize)


class RowFormat(NamedTuple):
    """The rows of a table, as they are on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_scales: bool

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of gathered rows unless a call names another."""
        return torch.float32 if self.has_scales else self.dtype


def gather_target(
    rows: RowFormat, ids: torch.Tensor, out: Any, dtype: torch.dtype | None, scale: float | None
) -> tuple[torch.Tensor, tuple[str, str, float | None] | None]:
    """Return the tensor for the rows of these ids, and their conversion."""
    shape = (*ids.shape, *rows.shape)
    given: object = scale
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
        msg = f"scale is {shown(given)}; it must be a number"
        raise TypeError(msg)
    if out is not None and not isinstance(out, torch.Tensor):
        msg = f"out must be a torch tensor, not {type(out).__name__}"
        raise TypeError(msg)
    if out is None:
        out = torch.empty(shape, dtype=rows.gathered_dtype if dtype is None else checked_dtype(dtype))
    elif tuple(out.shape) != shape or not out.is_contiguous():
        kind = "" if out.is_contiguous() else ", not contiguous"
        msg = f"out has the shape {tuple(out.shape)}{kind}; it must be contiguous, of the shape {shape}"
        raise InvalidArgumentError(msg)
    elif dtype is not None and dtype != out.dtype:
        msg = f"dtype is {dtype}, and out is {out.dtype}; leave dtype out, or give one of that dtype"
        raise TypeError(msg)
    if out.dtype == rows.dtype and scale is None and not rows.has_scales:
        return out, None
    if rows.dtype not in CONVERTED or out.dtype not in FLOATS:
        if rows.dtype in CONVERTED:
            msg = (
                f"the result would be {out.dtype}, and converted or scaled rows are bfloat16, float16 or float32; "
                "pass one of these, such as dtype=torch.float32"
            )
        else:
            msg = f"rows of {rows.dtype} cannot be converted or scaled; gather them as they are, and convert the result"
        raise TypeError(msg)
    return out, (CONVERTED[rows.dtype], FLOATS[out.dtype], scale)


def _as_tensor(ids: Any) -> torch.Tensor:
    """Make a tensor of an array, or of a list of integers."""
    try:
        # A copy: torch warns of arrays that cannot be written to, and refuses negative strides.
        tensor = torch.tensor(ids.copy() if hasattr(ids, "__array_interface__") else ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if is_of_handler(error):
            raise
        large = _first_large(ids, [0])
        if large is not None:
            msg = "id {} at position {} is no row, and exceeds 64 bits".format(*large)
            raise IndexError(msg) from None
        msg = f"ids are {shown(ids)}; they must be a tensor, an array or a list of integers"
        raise TypeError(msg) from error
    return tensor.to(torch.int64) if tensor.numel() == 0 and isinstance(ids, list | tuple) else tensor


def _first_large(ids: Any, position: list[int]) -> tuple[int, int] | None:
    """Return the first integer of nested lists that no tensor can hold, and its position."""
    if isinstance(ids, int):
        position[0] += 1
        return None if -(1 << 63) <= ids < 1 << 63 else (ids, position[0] - 1)
    if isinstance(ids, list | tuple):
        for one in ids:
            if (found := _first_large(one, position)) is not None:
                return found
    return None
