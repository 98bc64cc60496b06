"""A gather in flight."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from deepnvme._utils.public import public
from deepnvme.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

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
