"""The tensors of a checkpoint that can be a table."""

from __future__ import annotations

import math
from typing import Any

import torch

from deepnvme._checkpoint.load_request import LoadRequest
from deepnvme._checkpoint.source_files import SourceFile, tensor_entries
from deepnvme._rows.locate import QUANTISED, row_major

# A vector has no rows.
_DIMENSIONS_MIN = 2


def list_tables(source: str) -> list[dict[str, Any]]:
    """List the tensors that can be a table, the largest first."""
    request = LoadRequest(path=source, device=torch.device("cpu"), verify="auto")
    found = request.for_files(lambda files: [table for file in files for table in _tables_of(request, file)])
    return sorted(found, key=lambda table: (-table["bytes"], table["name"]))


def _tables_of(request: LoadRequest, file: SourceFile) -> list[dict[str, Any]]:
    reader = request.open(file)
    signed = {number for number, *signs in reader.signs() if any(signs)}
    tables = []
    for number, entry in enumerate(tensor_entries(reader)):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        is_plain = dtype not in QUANTISED and number not in signed and entry.strides == row_major(entry.shape)
        is_listed = file.names is None or entry.name in file.names
        if not is_listed or not is_plain or len(entry.shape) < _DIMENSIONS_MIN or 0 in entry.shape:
            continue
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        size = {"row_bytes": row_bytes, "bytes": entry.shape[0] * row_bytes}
        tables.append({"name": entry.name, "shape": entry.shape, "dtype": entry.dtype, **size})
    return tables
