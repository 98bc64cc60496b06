"""Load groups of weights into slots, bind them to their modules while these run, and load those that stay in memory."""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import _Streamer, span
from deepnvme._modules.weight_classes import BoundParameter
from deepnvme._stream.calling_threads import ThreadTurns
from deepnvme._stream.memory_budget import PAGE_BYTES, slot_offsets
from deepnvme._stream.parameter_binding import (
    ParameterBinding,
    get_weight,
    refuse_backward,
    set_weight,
    view_weight,
    without_views,
)
from deepnvme._stream.weight_origin import CACHE_LINE_BYTES, conversions
from deepnvme._utils.tensors import pinned_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from deepnvme._modules.partition import LayerGroup, Weight
    from deepnvme._stream.calling_threads import RunningCalls
    from deepnvme._stream.parameter_binding import ChangedBuffers
    from deepnvme._stream.planner import Slots
    from deepnvme._stream.weight_origin import Origin, WeightFiles

# A layer that waits longer than this for its weights has a stall in timelines.
_STALL_NS_MIN = 50_000


class LayerCache:
    """Load the weights of each group before its modules run, and unbind them afterwards.

    Args:
        groups: layer groups in execution order.
        files: their files.
        slots: the slot of each group.
        device: device of the slots.
        calls: counts the calls of the modules.
        changed: the buffers that the modules have changed.
    """

    def __init__(  # noqa: PLR0917
        self,
        groups: Sequence[LayerGroup],
        files: WeightFiles,
        slots: Slots,
        device: torch.device,
        calls: RunningCalls,
        changed: ChangedBuffers,
    ) -> None:
        self.groups = list(groups)
        self._origins = [[files.origin_of[weight.name] for weight in group.weights] for group in groups]
        self._layouts = slots.layouts
        self._class_of = slots.class_of
        # The slot of each group while nothing is loaded.
        self._fixed_slots: list[int] | None = None
        self.classes = slots.classes
        self.memory_bytes = slots.nbytes
        on_host = device.type == "cpu"
        self._memory = (
            pinned_empty(self.memory_bytes)
            if on_host
            else torch.empty(self.memory_bytes, dtype=torch.uint8, device=device)
        )
        reads = [(slots.class_of[index], [*layout.reads]) for index, layout in enumerate(self._layouts)]
        conversions = [[*layout.conversions] for layout in self._layouts]
        classes = [(each.slots, each.prefetch, each.slot_bytes, each.shares_memory) for each in self.classes]
        self._streamer = _Streamer(
            list(files.sources), reads, classes, self._memory, files.engine, conversions, slots.compressed_bytes_max
        )
        self._stream_of: Callable[[], torch.cuda.Stream | None] = (
            (lambda: None) if on_host else lambda: torch.cuda.current_stream(device)
        )
        # The views of each group in each slot it has used: made once, then reused in every step.
        self._views: dict[tuple[int, int], list[nn.Parameter | torch.Tensor]] = {}
        # `torch.utils.swap_tensors` refuses tensors with a weak reference: a later call would find the other tensor.
        self._references: list[weakref.ref[torch.Tensor]] = []
        self._bindings = [ParameterBinding(group.weights, device, calls, changed) for group in groups]
        self._turns = ThreadTurns(calls.check)
        # For timelines; does nothing unless one is recorded.
        self._span = span if files.engine is None else files.engine.span
        for index, group in enumerate(groups):
            calls.wrap(group.module, self._wrapper_of(index, group.name, self._bindings[index]))
        for index, group in enumerate(groups):
            for alias in group.aliases:
                self._bindings.append(ParameterBinding(alias.weights, device, calls, changed))
                calls.wrap(alias.module, self._wrapper_of(index, alias.name, self._bindings[-1]))

    @property
    def compressed_cache_bytes(self) -> int:
        """Bytes of the compressed-weight cache."""
        return self._streamer.cache_bytes

    def warm_up(self) -> None:
        """Start loading the first groups."""
        self._streamer.warm_up()

    def stats(self) -> dict[str, float]:
        """Return the counters of reads and waits."""
        counters: dict[str, float] = self._streamer.stats()
        return counters

    def fetch_all(self) -> None:
        """Load each group in turn without computing."""
        for index in range(len(self.groups)):
            held: list[int] = []
            try:
                # `map` runs no bytecode between the call and the append, where Ctrl-C could come. So the list always
                # holds what was acquired.
                held.extend(map(self._streamer.acquire, (index,)))
            finally:
                if held:
                    self._streamer.release(index)

    @contextmanager
    def without_disk(self) -> Iterator[None]:
        """Run groups with the bytes that happen to be in their slots, without loading."""
        begins, _ = slot_offsets(self.classes)
        starts = [
            [begin + slot * each.slot_bytes for slot in range(each.slots)]
            for begin, each in zip(begins, self.classes, strict=True)
        ]
        self._fixed_slots = [
            starts[class_index][index % len(starts[class_index])] for index, class_index in enumerate(self._class_of)
        ]
        try:
            yield
        finally:
            self._fixed_slots = None

    def stop(self) -> None:
        """Stop loading. Calls that wait for weights raise."""
        self._streamer.close()

    def clear(self) -> None:
        """Drop all views of the memory. No module runs."""
        self._views.clear()

    def _wrapper_of(
        self, index: int, name: str, binding: ParameterBinding
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a wrapper that runs a group's module, or an alias of it, with its weights in place."""
        acquire, release = self._streamer.acquire, self._streamer.release

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                fixed = self._fixed_slots
                if fixed is not None:
                    return with_weights(fixed[index], args, kwargs)
                held: list[int] = []
                stream = self._stream_of()
                called = time.monotonic_ns()
                try:
                    self._turns.acquire(held, acquire, index)
                    begun = time.monotonic_ns()
                    if begun - called > _STALL_NS_MIN:
                        self._span(name, "stall", called, begun)
                    return with_weights(held[0], args, kwargs)
                finally:
                    # First statement in `finally`, so that Ctrl-C cannot come before it: an unreleased group would be
                    # lost.
                    if held:
                        release(index, stream)
                    self._turns.release()

            def with_weights(slot: int, args: Any, kwargs: Any) -> Any:
                binding.bind(self._views_at(index, slot))
                begun = time.monotonic_ns()
                try:
                    return refuse_backward(name, without_views(self._memory, forward(*args, **kwargs)))
                finally:
                    binding.unbind()
                    self._span(name, "compute", begun, time.monotonic_ns())

            return run

        return around

    def _views_at(self, index: int, slot: int) -> Sequence[nn.Parameter | torch.Tensor]:
        known = self._views.get((index, slot))
        if known is None:
            known = [
                view_weight(self._memory, slot + place, origin, original)
                for place, origin, original in zip(
                    self._layouts[index].offsets, self._origins[index], self._bindings[index].originals, strict=True
                )
            ]
            self._views[index, slot] = known
            self._references += map(weakref.ref, known)
        return known


def place_resident(weights: Sequence[Weight], origin_of: Mapping[str, Origin]) -> tuple[dict[Origin, int], int]:
    """Assign an offset to each weight, at its required position within a cache line.

    Returns:
        The offset of each, and the bytes of all.
    """
    places: dict[Origin, int] = {}
    at = 0
    for weight in weights:
        origin = origin_of[weight.name]
        if origin not in places:
            places[origin] = at + origin.line_offset
            at += -(-(origin.line_offset + origin.memory_nbytes) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return places, at


def load_resident(weights: Sequence[Weight], files: WeightFiles, device: torch.device, changed: ChangedBuffers) -> None:
    """Read weights once and bind them to their modules; `changed` learns what these had before."""
    if not weights:
        return
    places, nbytes = place_resident(weights, files.origin_of)
    memory = torch.empty(max(-(-nbytes // PAGE_BYTES), 1) * PAGE_BYTES, dtype=torch.uint8, device=device)
    reads, converted = [], []
    for origin, place in places.items():
        if not origin.is_raw:
            converted += conversions(origin, place)
            continue
        start = place
        for byte_range in origin.ranges:
            reads.append((byte_range.source, byte_range.offset, byte_range.nbytes, start))
            start += byte_range.nbytes
    # All of them are one group that is loaded once.
    streamer = _Streamer(
        files=list(files.sources),
        groups=[(0, reads)],
        classes=[(1, 0, memory.nbytes, False)],  # slots, prefetch limit, bytes of a slot, whether slots share memory
        arena=memory,
        engine=files.engine,
        conversions=[converted],
    )
    streamer.acquire(0)
    streamer.close()
    known: dict[int, torch.Tensor] = {}
    for weight in weights:
        # A parameter that two modules share stays shared.
        original = get_weight(weight)
        if id(original) not in known:
            origin = files.origin_of[weight.name]
            known[id(original)] = view_weight(memory, places[origin], origin, original, BoundParameter)
            changed.watch(original, known[id(original)])
        set_weight(weight, known[id(original)])
