"""Rows of embeddings and experts of layers: only those that are picked are in memory."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from deepnvme._deepnvme import StripeSet, _picked_page_bytes, _Picker
from deepnvme._stream.memory_budget import PAGE_BYTES
from deepnvme._stream.parameter_binding import Shown, get, refuse_backward, view, wrap
from deepnvme._stream.scheduler import Turns
from deepnvme._stream.weight_origin import FLOATS, stretches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deepnvme._deepnvme import Engine
    from deepnvme._stream.partition import Picks
    from deepnvme._stream.weight_origin import Origin, Piece, Stretch

    # One row behind the other, the pieces of each, or what they become and its type.
    _Places: TypeAlias = tuple[int, int] | list[list[tuple[int, int, int]]] | tuple[list[Stretch], str]

# Rows that are fetched together, at most: more would read what nobody has asked for.
_ROWS_BYTES_MAX = 64 << 10

# What counts rows and experts counts apart from what counts layers.
_NAMES = {"hits": "picked_hits", "waits": "picked_waits", "fetches": "picked_fetches"}


class Picked:
    """Has the rows that a module is about to look up in memory before it runs.

    Args:
        picks: the modules.
        origin_of: where each weight is, by its name.
        sources: the files.
        memory: bytes of rows and experts that are in memory at a time.
        engine: reads the files.
    """

    def __init__(
        self,
        picks: Sequence[Picks],
        origin_of: Mapping[str, Origin],
        sources: Sequence[str | StripeSet],
        memory: int,
        engine: Engine | None,
    ) -> None:
        self.memory = memory
        self._picks = list(picks)
        self._origin_of = origin_of
        # First row of each module among all, and rows that are one item.
        self._firsts: list[tuple[int, int]] = []
        self._page_bytes = page_bytes([[origin_of[weight.name] for weight in pick.weights] for pick in self._picks])
        parts: list[tuple[int, int, int, int, int, _Places]] = []
        places: list[list[tuple[int, Origin]]] = []
        at, items = 0, 0
        for pick in self._picks:
            origins = [origin_of[weight.name] for weight in pick.weights]
            rows = _rows_together(origins)
            count = -(-origins[0].shape[0] // rows)
            self._firsts.append((items, rows))
            places.append([])
            for origin in origins:
                row_bytes = origin.memory_nbytes // origin.shape[0]
                at = _congruent(at, origin)
                parts.append((items, count, at, rows * row_bytes, origin.memory_nbytes, _places(origin)))
                places[-1].append((at, origin))
                at += origin.memory_nbytes
            items += count
        self._picker = _Picker(list(sources), parts, at, memory, engine)
        self._turns = Turns()
        self._whole = torch.utils.dlpack.from_dlpack(self._picker.capsule())
        self._shown = [Shown(pick.weights, torch.device("cpu")) for pick in picks]
        self._views = [
            [
                view(self._whole, place, origin, like)
                for (place, origin), like in zip(some, shown.originals, strict=True)
            ]
            for some, shown in zip(places, self._shown, strict=True)
        ]
        self._wraps = [wrap(pick.module, self._running(index)) for index, pick in enumerate(picks)]

    def stats(self) -> dict[str, float]:
        """What was fetched, and how many rows and experts were there."""
        figures = self._picker.stats()
        return {_NAMES.get(name, name): value for name, value in figures.items()}

    def close(self) -> None:
        """Have all modules run as before, with what stood in them before."""
        for unwrap in self._wraps:
            unwrap()
        for shown in self._shown:
            shown.restore()
        self._views.clear()

    def _running(self, index: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Run a module with the rows in memory that it is called with."""
        pick, (first, rows) = self._picks[index], self._firsts[index]
        position, name = pick.argument
        is_rows = isinstance(pick.module, nn.Embedding)
        count = get(pick.weights[0]).shape[0]
        pick_items, release, shown = self._picker.pick, self._picker.release, self._shown[index]
        origins = [self._origin_of[weight.name] for weight in pick.weights]
        items_max = self.memory // item_bytes(origins, self._page_bytes)

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            def with_items(items: list[int], call: Callable[[], Any]) -> Any:
                held: list[None] = []
                try:
                    self._turns.get(held, pick_items, items)
                    shown.show(self._views[index])
                    return refuse_backward(self._whole, pick.name, call())
                finally:
                    if held:
                        release(items)
                        shown.hide()
                    self._turns.end()

            def run(*args: Any, **kwargs: Any) -> Any:
                indices = kwargs[name] if name in kwargs else args[position]
                if not isinstance(indices, torch.Tensor):
                    raise TypeError(
                        f"{pick.name} was called with {type(indices).__name__} for {name}, not with a tensor of indices"
                    )
                used = torch.unique(indices.detach().to("cpu", torch.int64))
                # What is no index here (padding of a router, or an error that torch will raise) picks nothing.
                items = sorted({first + row // rows for row in used.tolist() if 0 <= row < count})
                if not is_rows or len(items) <= items_max or len(used) != ((used >= 0) & (used < count)).sum():
                    return with_items(items, lambda: forward(*args, **kwargs))
                # More than there is memory for at once: some after the others.
                output: torch.Tensor | None = None
                places = torch.div(indices, rows, rounding_mode="floor") + first
                for start in range(0, len(items), items_max):
                    some = items[start : start + items_max]
                    chosen = (places >= some[0]) & (places <= some[-1])
                    part = with_items(some, functools.partial(forward, indices[chosen]))
                    if output is None:
                        output = part.new_empty(*indices.shape, *part.shape[1:])
                    output[chosen] = part
                return output

            return run

        return around


def page_bytes(picked: Sequence[Sequence[Origin]]) -> int:
    """Say what the memory comes in that all these are picked into."""
    pieces = [size for origins in picked for size in _piece_bytes(origins)]
    return _picked_page_bytes(min(pieces, default=0))


def item_bytes(origins: Sequence[Origin], page: int) -> int:
    """Count the bytes of memory that are picked at once, at the least."""
    return sum(resident_bytes(size, page) for size in _piece_bytes(origins))


def resident_bytes(nbytes: int, page: int) -> int:
    """Count the memory that so many bytes take at the most: whole pages, of which they may begin and end within two."""
    return ((nbytes + page - 2) // page + 1) * page if nbytes else 0


def _piece_bytes(origins: Sequence[Origin]) -> list[int]:
    rows = _rows_together(origins)
    return [rows * (origin.memory_nbytes // origin.shape[0]) for origin in origins]


def _rows_together(origins: Sequence[Origin]) -> int:
    """Count the rows that begin and end with a page, as far as those are not too many."""
    row_bytes = max(origin.memory_nbytes // origin.shape[0] for origin in origins)
    if len(origins) > 1 or row_bytes >= _ROWS_BYTES_MAX:
        return 1
    rows = PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES)
    return max(min(rows, _ROWS_BYTES_MAX // row_bytes), 1)


def _congruent(at: int, origin: Origin) -> int:
    """Find the next place that lies in a page as the first byte does in its file."""
    page = -(-at // PAGE_BYTES) * PAGE_BYTES
    return page + (origin.pieces[0].offset % PAGE_BYTES if origin.is_as_on_disk else origin.begins_at)


def _places(origin: Origin) -> _Places:
    if not origin.is_plain:
        return stretches(origin), FLOATS[origin.memory_dtype]
    if len(origin.pieces) == 1:
        return origin.pieces[0].source, origin.pieces[0].offset
    row_bytes = origin.nbytes // origin.shape[0]
    return [[_stretch(piece) for piece in origin.part(row * row_bytes, row_bytes)] for row in range(origin.shape[0])]


def _stretch(piece: Piece) -> tuple[int, int, int]:
    return piece.source, piece.offset, piece.nbytes
