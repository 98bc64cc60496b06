"""Load only the rows of embeddings and the experts that are used: into a cache, or for a GPU into a small tensor."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from deepnvme._deepnvme import _row_page_bytes, _RowStore, _SparseRowCache
from deepnvme._stream.calling_threads import ThreadTurns
from deepnvme._stream.memory_budget import PAGE_BYTES
from deepnvme._stream.parameter_binding import (
    ParameterBinding,
    checked_wrapper,
    get_weight,
    refuse_backward,
    view_weight,
    without_views,
)
from deepnvme._stream.weight_origin import FLOATS, stored_ranges
from deepnvme._utils.devices import relaxed_capture_for
from deepnvme._utils.public import warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepnvme._modules.partition import RowLookup
    from deepnvme._stream.calling_threads import RunningCalls
    from deepnvme._stream.parameter_binding import ChangedBuffers
    from deepnvme._stream.weight_origin import ByteRange, Origin, StoredRange, WeightFiles

    # Source and offset of contiguous rows; or the ranges of each row; or stored ranges and their target dtype.
    _RowLocations: TypeAlias = tuple[int, int] | list[list[tuple[int, int, int]]] | tuple[list[StoredRange], str]

# Maximum bytes of rows that are read together. More would read rows that nobody asked for.
_ROWS_BYTES_MAX = 64 << 10

# Counters of rows and experts have their own names, apart from those of layers.
_NAMES = {"hits": "row_hits", "waits": "row_waits", "fetches": "row_fetches"}
# A table has at least memory for this many rows, and for this many bytes.
_ROWS_MIN, _BYTES_MIN = 64, 1 << 20


class _UsesOtherExpertsError(Exception):
    """A module used experts that were not loaded. Its result is wrong."""


@dataclass(frozen=True)
class UsedLookups:
    """The modules of a streamed model of which only some rows are loaded."""

    lookups: Sequence[RowLookup]
    files: WeightFiles
    """The files of their weights."""
    calls: RunningCalls
    """Counts their calls."""
    changed: ChangedBuffers
    """The buffers that they have changed."""

    def origins_of(self, lookup: RowLookup) -> list[Origin]:
        """Find the weights of a module in the files."""
        return [self.files.origin_of[weight.name] for weight in lookup.weights]

    def binding_of(self, lookup: RowLookup, device: torch.device) -> ParameterBinding:
        """Make the binding of a module to weights on a device."""
        return ParameterBinding(lookup.weights, device, self.calls, self.changed)


class RowCache:
    """Load the rows that a module is about to use before it runs.

    Args:
        used: the modules.
        memory: bytes for rows and experts.
    """

    def __init__(self, used: UsedLookups, memory: int) -> None:
        files, calls = used.files, used.calls
        self.memory = memory
        self._lookups = list(used.lookups)
        # For each module: number of its first item, and rows per item.
        self._firsts: list[tuple[int, int]] = []
        self._page_bytes = page_bytes([used.origins_of(lookup) for lookup in self._lookups])
        tensors: list[tuple[int, int, int, int, int, _RowLocations]] = []
        places: list[list[tuple[int, Origin]]] = []
        at, items = 0, 0
        for lookup in self._lookups:
            origins = used.origins_of(lookup)
            rows = _rows_per_item(origins)
            count = -(-origins[0].shape[0] // rows)
            self._firsts.append((items, rows))
            places.append([])
            for origin in origins:
                row_bytes = origin.memory_nbytes // origin.shape[0]
                at = _congruent(at, origin)
                tensors.append((items, count, at, rows * row_bytes, origin.memory_nbytes, _locations_of(origin)))
                places[-1].append((at, origin))
                at += origin.memory_nbytes
            items += count
        self._cache = _SparseRowCache(list(files.sources), tensors, at, memory, files.engine)
        # Modules that use experts other than the selected ones. All their experts are loaded.
        self._uses_all: set[int] = set()
        self._turns, self._calls = ThreadTurns(calls.check), calls
        self._memory = torch.utils.dlpack.from_dlpack(self._cache.capsule())
        self._bindings = [used.binding_of(lookup, torch.device("cpu")) for lookup in self._lookups]
        self._views = [
            [
                view_weight(self._memory, place, origin, like)
                for (place, origin), like in zip(some, binding.originals, strict=True)
            ]
            for some, binding in zip(places, self._bindings, strict=True)
        ]
        self._counts = [get_weight(lookup.weights[0]).shape[0] for lookup in self._lookups]
        self._items_max = [memory // item_bytes(used.origins_of(lookup), self._page_bytes) for lookup in self._lookups]
        # `torch.utils.swap_tensors` refuses tensors with a weak reference: a later call would find the other tensor.
        self._references = [weakref.ref(view) for views in self._views for view in views]
        for index, lookup in enumerate(self._lookups):
            calls.wrap(lookup.module, self._wrapper_of(index))

    def stats(self) -> dict[str, float]:
        """Return the counters of reads, and of rows and experts that were in memory."""
        counters = self._cache.stats()
        return {_NAMES.get(name, name): value for name, value in counters.items()}

    def clear(self) -> None:
        """Drop all views of the memory. No module runs."""
        self._views.clear()

    def _wrapper_of(self, index: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a wrapper that runs a module with the needed rows in memory."""
        lookup, binding = self._lookups[index], self._bindings[index]
        if lookup.argument is None:
            binding.set_look_up(self._calls.counted(functools.partial(self._look_up, index)))
            return checked_wrapper(lookup.name, binding)
        position, name = lookup.argument

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                indices = kwargs.get(name, args[position] if position < len(args) else None)
                call = functools.partial(forward, *args, **kwargs)
                if isinstance(indices, torch.Tensor) and index not in self._uses_all:
                    try:
                        return self._in_parts(
                            index, indices, lambda items, _: self._bound(index, items, call), can_divide=False
                        )
                    except _UsesOtherExpertsError:
                        self._uses_all.add(index)
                        warn_caller(
                            f"{lookup.name} uses experts that {name} does not select, so all of its experts are"
                            f" loaded in each call"
                        )
                first, count = self._firsts[index][0], self._counts[index]
                return self._bound(index, list(range(first, first + count)), call)

            return run

        return around

    def _look_up(
        self, index: int, indices: torch.Tensor, embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> Any:
        """Look the rows up that torch's embedding asks for."""

        def with_items(items: list[int], some: torch.Tensor | None) -> Any:
            return self._held(items, lambda: embed(self._views[index][0], indices if some is None else some))

        return self._in_parts(index, indices, with_items, can_divide=True)

    def _in_parts(self, index: int, indices: torch.Tensor, with_items: Callable[..., Any], *, can_divide: bool) -> Any:
        """Call a function with the items of some indices, and with these, or with ``None`` for all indices."""
        (first, rows), count, items_max = self._firsts[index], self._counts[index], self._items_max[index]
        used = torch.unique(indices.detach().to("cpu", torch.int64))
        # Invalid indices, such as a router's padding, select nothing. torch reports real errors.
        items = sorted({first + row // rows for row in used.tolist() if 0 <= row < count})
        if not can_divide or len(items) <= items_max or len(used) != ((used >= 0) & (used < count)).sum():
            return with_items(items, None)
        # More rows than fit at once are processed in parts.
        output: torch.Tensor | None = None
        places = torch.div(indices, rows, rounding_mode="floor") + first
        for start in range(0, len(items), items_max):
            some = items[start : start + items_max]
            chosen = (places >= some[0]) & (places <= some[-1])
            part = with_items(some, indices[chosen])
            if output is None:
                output = part.new_empty(*indices.shape, *part.shape[1:])
            output[chosen] = part
        return output

    def _bound(self, index: int, items: list[int], call: Callable[[], Any]) -> Any:
        """Call a function while these items are in memory and the module has its weights."""
        binding, name = self._bindings[index], self._lookups[index].name

        def bound() -> Any:
            binding.bind(self._views[index])
            # A copy of a view in the result reads it. So the uses are looked for behind that.
            result = without_views(self._memory, call())
            if self._cache.was_missing_row_used(self._firsts[index][0]):
                raise _UsesOtherExpertsError
            return refuse_backward(name, result)

        return self._held(items, bound, binding.unbind)

    def _held(self, items: list[int], call: Callable[[], Any], end: Callable[[], object] = lambda: None) -> Any:
        """Call a function while these items are in memory, and ``end`` after it, even if it fails."""
        held: list[None] = []
        try:
            self._turns.acquire(held, self._cache.acquire, items)
            return call()
        finally:
            if held:
                self._cache.release(items)
                end()
            self._turns.release()


def page_bytes(picked: Sequence[Sequence[Origin]]) -> int:
    """Choose the page size of the memory that holds all these rows."""
    sizes = [size for origins in picked for size in _item_sizes(origins)]
    return _row_page_bytes(min(sizes, default=0))


def item_bytes(origins: Sequence[Origin], page: int) -> int:
    """Return the memory that the smallest load needs: one item of each weight, in whole pages."""
    return sum(page_rounded_bytes(size, page) for size in _item_sizes(origins))


def page_rounded_bytes(nbytes: int, page: int) -> int:
    """Round up to whole pages. Both ends may lie within a page."""
    return ((nbytes + page - 2) // page + 1) * page if nbytes else 0


def _item_sizes(origins: Sequence[Origin]) -> list[int]:
    rows = _rows_per_item(origins)
    return [rows * (origin.memory_nbytes // origin.shape[0]) for origin in origins]


def _rows_per_item(origins: Sequence[Origin]) -> int:
    """Count the rows that start and end at a page boundary, up to a limit."""
    row_bytes = max(origin.memory_nbytes // origin.shape[0] for origin in origins)
    if len(origins) > 1 or row_bytes >= _ROWS_BYTES_MAX:
        return 1
    rows = PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES)
    return max(min(rows, _ROWS_BYTES_MAX // row_bytes), 1)


def _congruent(at: int, origin: Origin) -> int:
    """Find the next offset with the position that the bytes need: within a page as in the file, or in a cache line."""
    page = -(-at // PAGE_BYTES) * PAGE_BYTES
    return page + (origin.ranges[0].offset % PAGE_BYTES if origin.is_page_congruent else origin.line_offset)


def _locations_of(origin: Origin) -> _RowLocations:
    if not origin.is_raw:
        return stored_ranges(origin), FLOATS[origin.memory_dtype]
    if len(origin.ranges) == 1:
        return origin.ranges[0].source, origin.ranges[0].offset
    row_bytes = origin.nbytes // origin.shape[0]
    return [
        [_as_tuple(byte_range) for byte_range in origin.slice_bytes(row * row_bytes, row_bytes)]
        for row in range(origin.shape[0])
    ]


def _as_tuple(byte_range: ByteRange) -> tuple[int, int, int]:
    return byte_range.source, byte_range.offset, byte_range.nbytes


class GatheredRows:
    """Gather the rows that an embedding looks up, each time that it runs.

    Args:
        used: the embeddings. Each weight has an origin that can be gathered.
        memory: bytes of host memory for rows that are used often.
        device: the device of the model.
    """

    def __init__(self, used: UsedLookups, memory: int, device: torch.device) -> None:
        files, calls = used.files, used.calls
        self.memory, self._device = memory, device
        self._stores: list[_RowStore] = []
        self._origins = [used.origins_of(lookup)[0] for lookup in used.lookups]
        total = sum(origin.nbytes for origin in self._origins)
        for index, (lookup, origin) in enumerate(zip(used.lookups, self._origins, strict=True)):
            row_bytes = _row_bytes(origin)
            share = max(memory * origin.nbytes // total, _ROWS_MIN * row_bytes, _BYTES_MIN)
            sources = sorted({each.source for each in origin.ranges})
            ranges = [(sources.index(each.source), each.offset, each.nbytes // row_bytes) for each in origin.ranges]
            paths = [files.sources[source] for source in sources]
            self._stores.append(_RowStore(paths, (ranges, row_bytes), None, share, files.engine))
            binding = used.binding_of(lookup, device)
            binding.set_look_up(calls.counted(functools.partial(self._look_up, index)))
            calls.wrap(lookup.module, checked_wrapper(lookup.name, binding))

    def stats(self) -> dict[str, float]:
        """Return the counters of rows that were in host memory, and of those that were read."""
        counters = [store.stats() for store in self._stores]
        names = {"row_hits": "hits", "row_waits": "rows_read", "row_fetches": "reads", "bytes_read": "bytes_read"}
        return {name: sum(counted[theirs] for counted in counters) for name, theirs in names.items()}

    def clear(self) -> None:
        """Close all tables. No module runs."""
        for store in self._stores:
            store.close()

    def _look_up(
        self, index: int, indices: torch.Tensor, embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        origin = self._origins[index]
        used, places = torch.unique(indices.detach().to("cpu", torch.int64), return_inverse=True)
        if len(used) and not 0 <= int(used[0]) <= int(used[-1]) < origin.shape[0]:
            msg = "index out of range in self"
            raise IndexError(msg)
        rows = torch.empty(len(used), *origin.shape[1:], dtype=origin.memory_dtype, device=self._device)
        conversion = None if origin.cast_to is None else (FLOATS[origin.dtype], FLOATS[origin.cast_to], None)
        with relaxed_capture_for(rows.device):
            self._stores[index].gather((used, (True, used.element_size()), rows, conversion))
        return embed(rows, places.to(indices.device))


def can_gather(origin: Origin) -> bool:
    """Whether rows of a weight can be gathered: they lie whole in ranges of files, in a type that can be cast."""
    is_castable = origin.cast_to is None or (origin.dtype in FLOATS and origin.cast_to in FLOATS)
    is_plain = all(each.encoded is None for each in origin.ranges)
    return is_castable and is_plain and all(each.nbytes % _row_bytes(origin) == 0 for each in origin.ranges)


def _row_bytes(origin: Origin) -> int:
    return origin.nbytes // origin.shape[0]
