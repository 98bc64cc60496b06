"""The rows of one rank: those of other ranks read as zeros, so that a sum over the ranks has each row once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepnvme.integrations._tables.table import refuse_capture, use_on_current_stream

if TYPE_CHECKING:
    from deepnvme.integrations._tables.table import DiskTable, PendingRows


class OwnedRows:
    """A rank's rows of a table, looked up by the numbers of the whole table.

    Args:
        table: the rank's rows.
        start: number of the first one in the whole table.
    """

    def __init__(self, table: DiskTable, start: int) -> None:
        self._table, self._start, self._end = table, start, start + table.used_rows

    def start(
        self, ids: torch.Tensor, out: torch.Tensor | None = None, *, device: torch.device | None = None
    ) -> PendingOwnedRows:
        """Start reading the rows that this rank has.

        Args:
            ids: numbers of rows of the whole table, in any shape.
            out: a contiguous tensor for them, in the table's dtype or one that it can be converted to. Default: a new
                one in the table's dtype.
            device: device of the new tensor. Default: that of the ids.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            IndexError, OSError: as :meth:`deepnvme.RowStore.gather`.
        """
        refuse_capture(self._table.name, ids.device)
        device, ids = device or ids.device, ids.detach().cpu()
        if out is None:
            out = torch.empty(*ids.shape, self._table.columns, dtype=self._table.dtype, device=device)
        foreign = (ids < self._start) | (ids >= self._end)
        if bool(foreign.all()):
            return PendingOwnedRows(None, out, foreign)
        # Any row of this rank stands for those of others. It is read once.
        fallback = self._start if not bool(foreign.any()) else int(ids[~foreign][0])
        local = ids.masked_fill(foreign, fallback) - self._start
        return PendingOwnedRows(self._table.start(local, out), out, foreign)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Read the rows that this rank has into memory, in the background."""
        owned = ids[(ids >= self._start) & (ids < self._end)]
        if owned.numel():
            self._table.store().prefetch(owned - self._start)


class PendingOwnedRows:
    """A rank's rows that are being read."""

    def __init__(self, rows: PendingRows | None, out: torch.Tensor, foreign: torch.Tensor) -> None:
        self._rows, self._out, self._foreign = rows, out, foreign

    def finish(self) -> torch.Tensor:
        """Wait for the rows, and return them, with zeros for those of other ranks."""
        if self._rows is not None:
            self._rows.finish()
        if bool(self._foreign.any()):
            # Bytes, because torch cannot fill all dtypes. Zeros of all dtypes are bytes of zeros.
            bits = self._out.view(torch.uint8)
            bits.masked_fill_(self._foreign.unsqueeze(-1).to(bits.device), 0)
        return use_on_current_stream(self._out)
