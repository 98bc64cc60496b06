"""Read the values of saved state, range by range, from the extents of any number of files."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import torch

from deepnvme._deepnvme import read_batch
from deepnvme.optim._formats import BLOCK, FP32, decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deepnvme._utils.tensors import MemoryOrder
    from deepnvme.optim._formats import StateFormat, StateKind
    from deepnvme.optim._state_file import StateExtent

# Elements that are read at once: 2 MiB as fp32, and several times as much for the places of elements in another memory
# order. A multiple of a block.
ELEMENTS_MAX = 1 << 19


class SavedValues:
    """One kind of state of a tensor: its extents in all files, which may overlap."""

    def __init__(self, extents: Iterable[StateExtent]) -> None:
        self._extents = sorted(extents, key=lambda extent: extent.begin)
        self._begins = [extent.begin for extent in self._extents]
        # The largest end so far, in the same order.
        self._ends = list(itertools.accumulate((extent.end for extent in self._extents), max))

    def missing(self, first: int, end: int) -> int | None:
        """Return the first element of a range that no extent has, if there is one."""
        for extent in self._within(first, end):
            if extent.begin > first:
                break
            first = max(first, extent.end)
        return first if first < end else None

    def matching(self, first: int, count: int, form: StateFormat) -> StateExtent | None:
        """Return the extent of exactly these elements in this format."""
        for extent in self._extents[bisect_left(self._begins, first) : bisect_right(self._begins, first)]:
            if extent.count == count and extent.format == form:
                return extent
        return None

    def fill(self, values: torch.Tensor, first: int, kind: StateKind) -> None:
        """Fill at most ``ELEMENTS_MAX`` values with the elements from ``first`` on."""
        for extent in self._within(first, first + len(values)):
            low, high = max(extent.begin, first), min(extent.end, first + len(values))
            # Elements of 8 bits share a scale with others of their block.
            begin = (low - extent.begin) // BLOCK * BLOCK
            found = _read(extent, [(begin, _block_end(extent, high - extent.begin))], kind)
            values[low - first : high - first] = found[low - extent.begin - begin :][: high - low]

    def gather(self, values: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, kind: StateKind) -> None:
        """Set the values at ``targets`` to the elements at ``places``, which ascend."""
        for extent in self._within(int(places[0]), int(places[-1]) + 1):
            low, high = torch.searchsorted(places, torch.tensor([extent.begin, extent.end])).tolist()
            own, into = places[low:high] - extent.begin, targets[low:high]
            blocks = own // BLOCK
            # Whole blocks, adjacent ones at once.
            for some in torch.unique_consecutive(blocks).split(ELEMENTS_MAX // BLOCK):
                low, high = torch.searchsorted(blocks, torch.stack([some[0], some[-1] + 1])).tolist()
                cuts = [0, *((some.diff() > 1).nonzero().flatten() + 1).tolist(), len(some)]
                numbers = some.tolist()
                runs = [
                    (numbers[begin] * BLOCK, _block_end(extent, numbers[end - 1] * BLOCK + 1))
                    for begin, end in itertools.pairwise(cuts)
                ]
                found = _read(extent, runs, kind)
                rank = torch.searchsorted(some, blocks[low:high])
                values[into[low:high]] = found[rank * BLOCK + own[low:high] % BLOCK]

    def _within(self, first: int, end: int) -> Iterator[StateExtent]:
        begin = bisect_right(self._ends, first)
        for extent in itertools.islice(self._extents, begin, bisect_left(self._begins, end)):
            if extent.end > first:
                yield extent


def windows(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Split a range at the multiples of ``ELEMENTS_MAX``."""
    while begin < end:
        until = min((begin // ELEMENTS_MAX + 1) * ELEMENTS_MAX, end)
        yield begin, until
        begin = until


class ReorderedValues:
    """The state of a parameter whose elements are counted in another memory order in the files.

    Neighbours here may be anywhere there, so a window of elements is gathered at once, and kept until another one is
    needed.
    """

    def __init__(self, order: MemoryOrder, saved_order: MemoryOrder, saved: Mapping[StateKind, SavedValues]) -> None:
        # Stride in the order here, and in that of the files, from the slowest dimension on.
        strides = zip(order.stride, saved_order.stride, order.shape, strict=True)
        self._strides = sorted(((own, other) for own, other, size in strides if size > 1), reverse=True)
        self._saved = saved
        self._begin = -1
        self._values: dict[StateKind, torch.Tensor] = {}

    def fill(self, values: torch.Tensor, first: int, kind: StateKind, count: int) -> None:
        """Fill values with the elements from ``first`` on, which are in one window, of ``count`` in all."""
        begin = first // ELEMENTS_MAX * ELEMENTS_MAX
        if begin != self._begin:
            self._gather(begin, min(begin + ELEMENTS_MAX, count))
        values.copy_(self._values[kind][first - begin :][: len(values)])

    def _gather(self, begin: int, end: int) -> None:
        self._values.clear()
        self._begin = -1
        rest, places = torch.arange(begin, end), torch.zeros(end - begin, dtype=torch.int64)
        for own, other in self._strides:
            places += rest // own * other
            rest %= own
        places, targets = places.sort()
        for kind, saved in self._saved.items():
            values = torch.empty(end - begin)
            saved.gather(values, places, targets, kind)
            self._values[kind] = values
        self._begin = begin


def _block_end(extent: StateExtent, end: int) -> int:
    return min(-(-end // BLOCK) * BLOCK, extent.count)


def _read(extent: StateExtent, runs: Sequence[tuple[int, int]], kind: StateKind) -> torch.Tensor:
    """Read and decode runs of whole blocks of an extent, one after the other."""
    form, count = extent.format, sum(end - begin for begin, end in runs)
    memory = torch.empty(form.nbytes(count), dtype=torch.uint8)
    size, at, scales = form.dtype.itemsize, 0, form.scales_begin(count)
    items = []
    for begin, end in runs:
        items.append((extent.path, extent.offset + begin * size, memory[at * size : (at + end - begin) * size]))
        if form.has_scales:
            offset = extent.offset + form.scales_begin(extent.count) + begin // BLOCK * 4
            nbytes = -(-(end - begin) // BLOCK) * 4
            items.append((extent.path, offset, memory[scales : scales + nbytes]))
            scales += nbytes
        at += end - begin
    read_batch(items)
    if form is FP32:
        return memory.view(torch.float32)
    values = torch.empty(count)
    decode(form.view(memory, count), values, kind)
    return values
