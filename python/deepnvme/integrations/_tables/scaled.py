"""Rows of ``float8`` with scales of groups of columns, as in Engram: products in float32, rounded to bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepnvme.integrations._tables.shard import OwnedRows
from deepnvme.integrations._tables.table import DiskTable, refuse_capture, use_on_current_stream
from deepnvme.integrations._tables.weight import RowWeight, row_parameter

if TYPE_CHECKING:
    from deepnvme.integrations._tables.shard import PendingOwnedRows


def scale_parameter(rows: DiskTable, name: str, groups: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """Make the parameter of a table's scales: in memory, if half of the setting has room for them, or else on disk.

    Each row needs its scales, and they take far less memory: 8 bytes for 256 in DeepSeek-V4.1.
    """
    nbytes = rows.rows * groups * dtype.itemsize
    if rows.group.reserve(nbytes):
        scales = torch.empty(rows.rows, groups, dtype=dtype, device="cpu")
        return torch.nn.Parameter(scales, requires_grad=False)
    return row_parameter(DiskTable(name, (rows.rows, groups), dtype))


class ScaledRows:
    """A rank's rows with their scales.

    Args:
        weight: the rows, of which ``weight.table`` is on disk.
        scales: their scales, on disk or in memory: one for each of some equal groups of columns, as ``float8_e8m0fnu``
            or as its bytes.
        start: number of the first row in the whole table.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, start: int) -> None:
        assert isinstance(weight, RowWeight)
        self._weight, self._scales, self._start = weight, scales, start
        self._rows = OwnedRows(weight.table, start)
        self._scale_rows = OwnedRows(scales.table, start) if isinstance(scales, RowWeight) else None

    def start(self, ids: torch.Tensor) -> PendingScaledRows:
        """Start reading the rows that this rank has, and their scales.

        Args:
            ids: numbers of rows of the whole table, in any shape.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            IndexError, OSError: as :meth:`deepnvme.RowStore.gather`.
        """
        refuse_capture(self._weight.table.name, ids.device)
        # One copy from the device: it waits for the device.
        device, ids = ids.device, ids.detach().cpu()
        rows = self._rows.start(ids, device=device)
        if self._scale_rows is not None:
            return PendingScaledRows(rows, self._scale_rows.start(ids, device=device))
        local = ids - self._start
        local = local.masked_fill((local < 0) | (local >= self._scales.shape[0]), 0)
        if self._scales.shape[0] == 0:
            return PendingScaledRows(
                rows, torch.zeros(*ids.shape, self._scales.shape[1], dtype=torch.uint8, device=device)
            )
        return PendingScaledRows(rows, self._scales.view(torch.uint8)[local].to(device))

    def prefetch(self, ids: torch.Tensor) -> None:
        """Read the rows that this rank has, and their scales, into memory in the background.

        Args:
            ids: numbers of rows of the whole table, on the CPU.
        """
        self._rows.prefetch(ids)
        if self._scale_rows is not None:
            self._scale_rows.prefetch(ids)


class PendingScaledRows:
    """Rows and scales that are being read."""

    def __init__(self, rows: PendingOwnedRows, scales: PendingOwnedRows | torch.Tensor) -> None:
        self._rows, self._scales = rows, scales

    def finish(self) -> torch.Tensor:
        """Wait for them, and return the rows as bfloat16, with zeros for those of other ranks."""
        rows = self._rows.finish()
        scales = (
            use_on_current_stream(self._scales) if isinstance(self._scales, torch.Tensor) else self._scales.finish()
        )
        factors = scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()
        product = rows.float().view(*factors.shape, -1) * factors.unsqueeze(-1)
        return product.flatten(-2).to(torch.bfloat16)
