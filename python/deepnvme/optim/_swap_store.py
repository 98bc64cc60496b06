"""State on disk, in groups that are read, updated and written back one after another."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._swap import Swapper
from deepnvme._swap.shared import SwapperPart
from deepnvme._utils.public import parse_bytes
from deepnvme._utils.shards import from_local, local
from deepnvme.errors import ClosedError, InvalidArgumentError
from deepnvme.optim._gradients import SwappedGradients, swapped_gradient
from deepnvme.optim._layout import StateLayout
from deepnvme.optim._state_store import MASTER, LeasedState, ParameterSlice, decode, encode, flat, with_strides_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deepnvme._deepnvme import Kernel
    from deepnvme._swap import Borrowed, SwapStats
    from deepnvme.optim._layout import Placement, StateGroup
    from deepnvme.optim._state_store import StateKind

# A group gets at most 1/8 of the memory, and 64 MiB, so that the next can be read and the last written while one is
# updated.
_GROUP_MEMORY_FRACTION, _GROUP_BYTES_MAX = 1 / 8, 64 << 20
# Maximum length of the recorded order. No step of a real model is as long.
_TRACE_MAX = 1 << 20


def open_store(swap_dir: Any, memory: str | int, *, checksums: bool, kernel: Kernel | None) -> SwapStore:
    """Open a store of its own in folders, or in a part of a shared swapper.

    Args:
        swap_dir: folder of the swap file; several folders, one per drive; or the part.
        memory: bytes for state, and for gradients on disk.
        checksums: checksum everything that is written, and verify it when it is read.
        kernel: for gradients on disk; ``None`` keeps gradients in memory.
    """
    nbytes = parse_bytes(memory)
    is_part = isinstance(swap_dir, SwapperPart)
    swapper = swap_dir if is_part else Swapper(swap_dir, memory=nbytes, checksums=checksums)
    return SwapStore(swapper, nbytes, kernel=kernel)


class SwapStore:
    """State in a swap file with bounded memory.

    Args:
        swapper: contains the state. The store closes it.
        nbytes: its memory in bytes, of which a group of state takes a fraction.
        kernel: for gradients on disk; ``None`` keeps gradients in memory.
    """

    def __init__(self, swapper: Swapper | SwapperPart, nbytes: int, *, kernel: Kernel | None) -> None:
        self._is_closed = False
        # Changes when state gets other places.
        self.generation = 0
        self.swapper = swapper
        group_bytes = min(int(nbytes * _GROUP_MEMORY_FRACTION), _GROUP_BYTES_MAX)
        self.layout = StateLayout(group_bytes, with_gradients=kernel is not None)
        self.gradients = None
        if kernel is not None:
            self.gradients = SwappedGradients(
                self.swapper, self.layout, kernel, record_use=self._record_use, follow=self.follow
            )
        # Parameters that have state, possibly empty.
        self._with_state: set[torch.nn.Parameter] = set()
        # State and gradients of parameters that are being moved to another place.
        self._moving: dict[torch.nn.Parameter, tuple[dict[str, torch.Tensor], torch.Tensor | None]] = {}
        # Tensors that are borrowed. An interrupt may leave some of them unreturned.
        self._borrowed: list[Borrowed] = []
        # Groups with initial state that is still in memory.
        self._waiting: dict[StateGroup, None] = {}
        # Slices leased in this step; a repeated one starts the next step. Two param groups may share a state group, so
        # the first slice of a batch identifies it.
        self._leased: set[ParameterSlice] = set()
        self._trace: list[str] = []
        self._order: list[str] = []

    def stats(self) -> SwapStats:
        """Return the counters so far."""
        return self.swapper.stats()

    def has(self, param: torch.nn.Parameter) -> bool:
        """Whether there is state of that parameter."""
        return param in self._with_state

    def has_kind(self, param: torch.nn.Parameter, name: str) -> bool:
        """Whether there is that kind of state of a parameter."""
        return self.has(param) and any(kind.name == name for kind in self.layout.kinds(param) or ())

    def initialise(self, param: torch.nn.Parameter, state: dict[str, Any], kinds: tuple[StateKind, ...]) -> None:
        """Take over the given state, and initialise the rest. Master weights are copied from the parameter."""
        # Ctrl-C may come between any two calls, so state is removed only once it is stored elsewhere.
        is_new = param in self._moving or self.layout.kinds(param) != kinds or not self.layout.is_as_placed(param)
        taken = {kind.name: state[kind.name] for kind in kinds if state.get(kind.name) is not None}
        if not is_new and not taken and param in self._with_state:
            return
        self.generation += 1
        given = {name: flat(with_strides_of(param, tensor)) for name, tensor in taken.items()}
        if is_new:
            given = {**self._move(param, kinds), **given}
        locations = self.layout.locations(param)
        for _, placement in locations:
            placement.initial_values = {**(placement.initial_values or {}), **given}
        self._with_state.add(param)
        self._moving.pop(param, None)
        for name in taken:
            del state[name]
        if given:
            # Given state stays in memory until its group is full.
            self._waiting.update(dict.fromkeys(group for group, _ in locations))
            for group in [group for group in self._waiting if group is not self.layout.open_group]:
                self.prepare(group)

    def follow(self, param: torch.nn.Parameter) -> None:
        """Keep state and gradient of a parameter in its memory order, and the gradient in its dtype, after a change."""
        kinds = self.layout.kinds(param)
        if kinds is None or self.layout.is_as_placed(param):
            return
        if param in self._with_state:
            self.initialise(param, {}, kinds)
        else:
            self.generation += 1
            self._move(param, kinds)
            self._moving.pop(param, None)

    def _move(self, param: torch.nn.Parameter, kinds: tuple[StateKind, ...]) -> dict[str, torch.Tensor]:
        """Move a parameter to a place for other kinds of state or another memory order. Return its state, flat."""
        if param not in self._moving:
            order = self.layout.order(param)
            shape = tuple(local(param).shape)
            if order is not None and order.shape != shape:
                msg = f"a parameter has the shape {shape}, and its state the shape {order.shape}"
                raise InvalidArgumentError(f"{msg}; make a new optimizer after such a change")
            is_swapped = swapped_gradient(param) is not None
            gradient = self.gradients.read(param) if is_swapped and self.gradients is not None else None
            self._moving[param] = (self.read(param), gradient)
        before, gradient = self._moving[param]
        if self.gradients is not None:
            self.gradients.drop([param])
        for group in self.layout.remove(param):
            if group.is_on_disk:
                self.swapper.delete(group.key)
        self.layout.place(param, kinds)
        if self.gradients is not None and gradient is not None:
            self.gradients.put(param, gradient)
        return {kind.name: flat(with_strides_of(param, before[kind.name])) for kind in kinds if kind.name in before}

    def discard(self, param: torch.nn.Parameter) -> None:
        """Drop the state of a parameter. Its place is kept."""
        self.generation += 1
        self._with_state.discard(param)
        for _, placement in self.layout.locations(param):
            placement.initial_values = None

    def read(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Read the state of a parameter into new memory: fp32, in the memory order in which it is kept."""
        if param in self._moving:
            # An interrupt came before the state had its new place.
            return {name: tensor.clone() for name, tensor in self._moving[param][0].items()}
        order = self.layout.order(param)
        if param not in self._with_state or order is None:
            return {}
        count = math.prod(order.shape)
        found = {kind.name: torch.empty(count) for kind in self.layout.kinds(param) or ()}
        for group, placement in self.layout.locations(param):
            self.prepare(group)
            for kind, begin, end in placement.extents():
                memory = torch.empty(end - begin, dtype=torch.uint8)
                self.swapper.read(group.key, begin, memory)
                out = found[kind.name][placement.slice.begin : placement.slice.end]
                decode(kind.format.view(memory, placement.slice.count), out, kind)
        return {name: from_local(param, order.view(values)) for name, values in found.items()}

    def batches(self, slices: Sequence[ParameterSlice]) -> Iterator[Sequence[ParameterSlice]]:
        """Split whole parameters into batches by group."""
        wanted = {one.param for one in slices}
        groups = dict.fromkeys(group for one in slices for group, _ in self.layout.locations(one.param))
        for group in groups:
            yield [placement.slice for placement in group.placements if placement.slice.param in wanted]
        # Parameters without state.
        bare = [one for one in slices if not self.layout.locations(one.param)]
        if bare:
            yield bare

    @contextmanager
    def lease(self, batch: Sequence[ParameterSlice]) -> Iterator[list[LeasedState]]:
        """Lease the state of one batch and its gradients on disk, which count as used afterwards."""
        locations = {placement.slice: (group, placement) for group, placement in self.layout.locations(batch[0].param)}
        if batch[0] not in locations:
            yield [LeasedState({}) for _ in batch]
            return
        group = locations[batch[0]][0]
        placements = {placement.slice: placement for placement in group.placements}
        mine = [placements[one] for one in batch]
        with_grads = [placement for placement in mine if placement.grad_summary is not None]
        with self.lease_memory(group, batch[0], with_grads=bool(with_grads)) as (state, grads):
            yield [
                LeasedState(placement.state(state), placement.gradient(grads) if placement.grad_summary else None)
                for placement in mine
            ]
        if self.gradients is not None:
            self.gradients.mark_used(group, with_grads)

    @contextmanager
    def lease_memory(
        self, group: StateGroup, first: ParameterSlice, *, with_grads: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Lease the memory of a group's state, and of its gradients on disk if asked.

        ``first`` is the first slice that is used, and stands for the batch.
        """
        self._return()
        self.prepare(group)
        self._record_lease(first)
        with ExitStack() as borrowed:
            state = grads = torch.empty(0, dtype=torch.uint8)
            if group.nbytes:
                self._record_use(group.key)
                state = borrowed.enter_context(self._track(self.swapper.borrow(group.key)))
            if with_grads:
                self._record_use(group.grad_key)
                grads = borrowed.enter_context(self._track(self.swapper.borrow(group.grad_key, shared=True)))
            yield state, grads
        self._borrowed.clear()

    def batches_of(
        self, params: Sequence[torch.nn.Parameter], members: Sequence[int]
    ) -> tuple[list[tuple[StateGroup | None, ParameterSlice | None]], list[list[tuple[int, int, int, list[int]]]]]:
        """Return the batches of some parameters: their groups with the first slice, and their placements.

        A placement is ``(member, begin, end, offsets)``. The last batch may be of parameters without state.
        """
        found: dict[StateGroup | None, list[tuple[int, int, int, list[int]]]] = {}
        firsts: dict[StateGroup | None, ParameterSlice | None] = {}
        bare = []
        # Without repetitions.
        by_param = {params[member]: member for member in reversed(members)}
        for param, member in reversed(by_param.items()):
            locations = self.layout.locations(param)
            for group, placement in locations:
                placed, offsets = placement.slice, [begin for _, begin, _ in placement.extents()]
                firsts.setdefault(group, placed)
                found.setdefault(group, []).append((member, placed.begin, placed.end, offsets))
            if not locations:
                bare.append((member, 0, local(param).numel(), list[int]()))
        if bare:
            found[None], firsts[None] = bare, None
        return list(firsts.items()), list(found.values())

    def close(self) -> None:
        """Close the store. The state and the gradients on disk are gone."""
        self._is_closed = True
        self.swapper.close()
        if self.gradients is not None:
            self.gradients.close()

    def check_open(self) -> None:
        """Check that there is state to use.

        Raises:
            ClosedError: the store was closed, or belongs to the process that this one was forked from.
        """
        if self._is_closed:
            raise ClosedError("this optimizer was closed, and its state is gone; make a new one and load a checkpoint")
        # Raises in a forked child.
        self.swapper.prefetch(())

    def prepare(self, group: StateGroup) -> None:
        """Write the initial state of a group, as far as it is missing."""
        self._return()
        initial_values = [placement for placement in group.placements if placement.initial_values is not None]
        if group.nbytes and not group.is_on_disk:
            with self._track(self.swapper.create(group.key, [group.nbytes], torch.uint8)) as memory:
                memory.zero_()
                _write_initial(initial_values, memory)
            group.is_on_disk = True
        elif group.nbytes and initial_values:
            with self._track(self.swapper.borrow(group.key)) as memory:
                _write_initial(initial_values, memory)
        self._borrowed.clear()
        for placement in initial_values:
            placement.initial_values = None
        self._waiting.pop(group, None)

    def _track(self, borrow: Borrowed) -> Borrowed:
        """Remember a borrow, so that it is returned if an interrupt comes before its block ends."""
        self._borrowed.append(borrow)
        return borrow

    def _return(self) -> None:
        """Return tensors that an interrupt left borrowed."""
        for borrow in self._borrowed:
            borrow.release()
        self._borrowed.clear()

    def imported(self, group: StateGroup) -> None:
        """Mark the state of a group as loaded from elsewhere."""
        group.is_on_disk = True
        for placement in group.placements:
            placement.initial_values = None
        self._waiting.pop(group, None)

    def _record_lease(self, first: ParameterSlice) -> None:
        """Record a lease. The order of a complete step becomes the schedule of the next ones."""
        if first in self._leased:
            order, self._trace = self._trace, []
            self._leased.clear()
            if order != self._order:
                self._order = order
                self.swapper.schedule(order, repeat=True)
        self._leased.add(first)

    def _record_use(self, key: str) -> None:
        """Append a key to the order of this step."""
        if self._leased and len(self._trace) < _TRACE_MAX:
            self._trace.append(key)


def _write_initial(placements: Sequence[Placement], memory: torch.Tensor) -> None:
    for placement in placements:
        given: Mapping[str, torch.Tensor] = placement.initial_values or {}
        placed, state = placement.slice, placement.state(memory)
        for kind in placed.kinds:
            kept = state[kind.name]
            if kind.name in given:
                encode(kept, given[kind.name][placed.begin : placed.end].float(), kind)
            elif kind.name == MASTER:
                encode(kept, flat(placed.param)[placed.begin : placed.end].float(), kind)
            elif kind.initial:
                encode(kept, torch.full((placed.count,), kind.initial), kind)
            else:
                for one in (kept,) if isinstance(kept, torch.Tensor) else kept:
                    one.zero_()
