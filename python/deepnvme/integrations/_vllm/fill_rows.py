"""Fill a tensor with rows on disk: as vLLM's compiler and its CUDA graphs need it."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture

from deepnvme.integrations._tables.table import DiskTable

_tables: WeakValueDictionary[int, DiskTable] = WeakValueDictionary()


def number_of(table: DiskTable) -> int:
    """Return a number by which a compiled graph refers to a table."""
    number = id(table)
    _tables[number] = table
    return number


def _fill(ids: torch.Tensor, out: torch.Tensor, number: int) -> None:
    _tables[number].start(ids, out).finish()


# Between the pieces of a CUDA graph that can be broken, so that each replay reads.
_fill_between_graphs = eager_break_during_capture(_fill)


@torch.library.custom_op("deepnvme::fill_rows", mutates_args=("out",))
def _fill_op(ids: torch.Tensor, out: torch.Tensor, number: int) -> None:
    _fill(ids, out, number)


def rows_of(table: DiskTable, number: int, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of a table: eagerly, in a compiled model, or between the pieces of a breakable CUDA graph."""
    out = torch.empty(*ids.shape, table.columns, dtype=table.dtype, device=ids.device)
    fill: Any = _fill_op if torch.compiler.is_compiling() else _fill_between_graphs
    fill(ids, out, number)
    return out
