"""Lay out state on disk: parameters are split into placements, which are collected into groups. Pure.

A group is read and written at once. Its placements follow one another, each with all its kinds of state. The
gradients of a group, if they are on disk, are stored under a key of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from deepnvme._utils.shards import local
from deepnvme._utils.tensors import MemoryOrder
from deepnvme.optim._state_store import BLOCK, ParameterSlice, StateData, StateKind, order_of


@dataclass(eq=False)
class Placement:
    """Some elements of a parameter, and the position of their state and gradient in the group."""

    slice: ParameterSlice
    offset: int
    grad_offset: int
    # The parameter's dtype may change later.
    grad_dtype: torch.dtype
    # Given initial state; ``None`` once it has been written, or if none was given.
    initial_values: Mapping[str, torch.Tensor] | None = None
    # The sum of squares of its gradient, and whether all elements are finite, if it has a gradient.
    grad_summary: tuple[float, bool] | None = None

    def extents(self) -> list[tuple[StateKind, int, int]]:
        """List the byte range of each kind of state in the group."""
        found, at = [], self.offset
        for kind in self.slice.kinds:
            end = at + kind.format.nbytes(self.slice.count)
            found.append((kind, at, end))
            at = end
        return found

    def state(self, memory: torch.Tensor) -> dict[str, StateData]:
        """View its state in the memory of its group."""
        count = self.slice.count
        return {kind.name: kind.format.view(memory[begin:end], count) for kind, begin, end in self.extents()}

    def gradient(self, memory: torch.Tensor) -> torch.Tensor:
        """View its gradient in the memory of the group's gradients."""
        end = self.grad_offset + self.slice.count * self.grad_dtype.itemsize
        return memory[self.grad_offset : end].view(self.grad_dtype)


@dataclass(eq=False)
class StateGroup:
    """State that is read and written at once."""

    number: int
    placements: list[Placement] = field(default_factory=list)
    nbytes: int = 0
    grad_nbytes: int = 0
    # Whether state and gradients exist on disk.
    is_on_disk: bool = False
    has_grads: bool = False

    @property
    def key(self) -> str:
        """Key of its state."""
        return f"state.{self.number}"

    @property
    def grad_key(self) -> str:
        """Key of its gradients."""
        return f"grad.{self.number}"


class StateLayout:
    """All groups of an optimizer.

    Args:
        group_bytes: maximum bytes of a group, state and gradients together. A group of one block may have more.
        with_gradients: reserve bytes for gradients.
    """

    def __init__(self, group_bytes: int, *, with_gradients: bool) -> None:
        self.group_bytes = group_bytes
        self._with_gradients = with_gradients
        self._numbers = itertools.count()
        # Receives the next placement, if it fits.
        self.open_group: StateGroup | None = None
        self._locations: dict[torch.nn.Parameter, list[tuple[StateGroup, Placement]]] = {}
        self._kinds: dict[torch.nn.Parameter, tuple[StateKind, ...]] = {}
        self._orders: dict[torch.nn.Parameter, MemoryOrder] = {}

    def kinds(self, param: torch.nn.Parameter) -> tuple[StateKind, ...] | None:
        """Return the kinds of state of a parameter; ``None`` if it has no place."""
        return self._kinds.get(param)

    def order(self, param: torch.Tensor) -> MemoryOrder | None:
        """Return the memory order in which state and gradient of a parameter are kept; ``None`` if it has no place."""
        return self._orders.get(cast("torch.nn.Parameter", param))

    def is_as_placed(self, param: torch.nn.Parameter) -> bool:
        """Whether a parameter still has the memory order, and with gradients the dtype, for which it got its place."""
        order = self._orders.get(param)
        if order is None:
            return True
        placements = self._locations.get(param, ())
        has_dtype = not self._with_gradients or all(one.grad_dtype == param.dtype for _, one in placements)
        return order == order_of(param) and has_dtype

    def locations(self, param: torch.nn.Parameter) -> Sequence[tuple[StateGroup, Placement]]:
        """Return the group and placement of each part of a parameter, in element order."""
        return self._locations.get(param, ())

    def groups(self) -> list[StateGroup]:
        """Return all groups in order."""
        found = {group.number: group for locations in self._locations.values() for group, _ in locations}
        return [found[number] for number in sorted(found)]

    def place(self, param: torch.nn.Parameter, kinds: tuple[StateKind, ...]) -> None:
        """Assign a place to a parameter."""
        self.remove(param)
        # `_kinds` is set last, since an interrupt may come between any two calls.
        locations = self._locations[param] = []
        self._orders[param] = order_of(param)
        block_bytes = sum(self._bytes(param, kinds, BLOCK))
        if block_bytes == 0:
            self._kinds[param] = kinds
            return
        step = max(self.group_bytes // block_bytes, 1) * BLOCK
        count = local(param).numel()
        for begin in range(0, count, step):
            placed = ParameterSlice(param, begin, min(begin + step, count), kinds)
            state_bytes, grad_bytes = self._bytes(param, kinds, placed.count)
            group = self._group_for(state_bytes + grad_bytes)
            placement = Placement(placed, group.nbytes, group.grad_nbytes, param.dtype)
            group.nbytes += state_bytes
            group.grad_nbytes += grad_bytes
            locations.append((group, placement))
            group.placements.append(placement)
        self._kinds[param] = kinds

    def close_group(self) -> None:
        """Begin a new group with the next placement."""
        self.open_group = None

    def remove(self, param: torch.nn.Parameter) -> list[StateGroup]:
        """Remove a parameter. Return the groups that became empty."""
        self._kinds.pop(param, None)
        self._orders.pop(param, None)
        empty = []
        for group, placement in self._locations.get(param, []):
            if placement in group.placements:
                group.placements.remove(placement)
            if not group.placements:
                empty.append(group)
                # The next placement starts a new group, as if this one had never existed.
                if group is self.open_group:
                    self.open_group = None
        self._locations.pop(param, None)
        return empty

    def _bytes(self, param: torch.nn.Parameter, kinds: tuple[StateKind, ...], count: int) -> tuple[int, int]:
        state = sum(kind.format.nbytes(count) for kind in kinds)
        return state, -(-count * param.dtype.itemsize // 4) * 4 if self._with_gradients else 0

    def _group_for(self, nbytes: int) -> StateGroup:
        group = self.open_group
        is_fixed = group is None or group.is_on_disk or group.has_grads
        if group is None or is_fixed or group.nbytes + group.grad_nbytes + nbytes > self.group_bytes:
            group = self.open_group = StateGroup(next(self._numbers))
        return group
