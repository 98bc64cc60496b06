"""Choose the rows that a packed table holds together, and their order."""

from __future__ import annotations

import torch

# Copies make a file larger by this fraction of its rows at most.
_FRACTION_MAX = 8
# Numbers of hot rows have 32 bits in the file.
_ROWS_MAX = 1 << 32


def hot_rows(ids: torch.Tensor, rows: int) -> list[int]:
    """Return rows that occur more than once in a trace, in the order in which they occur first.

    Rows that are requested at the same time then lie near each other, and so do the most frequent ones.

    Raises:
        IndexError: the trace has an id that is no row.
    """
    if rows >= _ROWS_MAX or ids.numel() == 0:
        return []
    # torch has no unique values of the unsigned types beyond 8 bits.
    trace = ids.flatten().to(torch.int64)
    numbers, places, counts = torch.unique(trace, return_inverse=True, return_counts=True)
    for number in (int(numbers[0]), int(numbers[-1])):
        if not 0 <= number < rows:
            msg = f"trace has the id {number}, which is no row: the table has {rows} rows, from 0 on"
            raise IndexError(msg)
    first = torch.full_like(numbers, len(trace)).scatter_reduce_(0, places, torch.arange(len(trace)), "amin")
    hottest = torch.argsort(counts, descending=True, stable=True)[: min(rows // _FRACTION_MAX, int((counts > 1).sum()))]
    in_order = hottest[torch.argsort(first[hottest])]
    hot: list[int] = numbers[in_order].tolist()
    return hot
