"""How state is laid out on disk: parameters cut into parts, parts gathered into groups. Pure: there is no I/O here.

A group is what is read and written at once. Its parts follow one another, each with all kinds of state that it has;
beside it may be a second stretch of bytes with the parts' gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deepnvme.optim._formats import BLOCK, Kept, Kind
from deepnvme.optim._state_store import Piece


@dataclass(eq=False)
class Part:
    """Some elements of a parameter, and where in its group their state and their gradient begin."""

    piece: Piece
    offset: int
    grad_offset: int
    # What its state will begin with, as far as that was given; ``None`` where it has begun, or is not to yet.
    pending: Mapping[str, torch.Tensor] | None = None
    # The sum of the squares of its gradient, where it has one, and whether that is finite.
    grad: tuple[float, bool] | None = None

    def stretches(self) -> list[tuple[Kind, int, int]]:
        """Tell where in its group each kind of state begins and ends."""
        found, at = [], self.offset
        for kind in self.piece.kinds:
            end = at + kind.format.nbytes(self.piece.count)
            found.append((kind, at, end))
            at = end
        return found

    def state(self, memory: torch.Tensor) -> dict[str, Kept]:
        """See its state in the memory of its group."""
        count = self.piece.count
        return {kind.name: kind.format.view(memory[begin:end], count) for kind, begin, end in self.stretches()}

    def gradient(self, memory: torch.Tensor) -> torch.Tensor:
        """See its gradient in the memory of its group's gradients."""
        dtype = self.piece.param.dtype
        return memory[self.grad_offset : self.grad_offset + self.piece.count * dtype.itemsize].view(dtype)


@dataclass(eq=False)
class Group:
    """What is read and written at once."""

    number: int
    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0
    grad_nbytes: int = 0
    # Whether there is something on disk, of its state and of its gradients.
    is_there: bool = False
    has_grads: bool = False

    @property
    def key(self) -> str:
        """The name of its state."""
        return f"state.{self.number}"

    @property
    def grad_key(self) -> str:
        """The name of its gradients."""
        return f"grad.{self.number}"


class Layout:
    """All groups.

    Args:
        group_bytes: what one has at most, of state and gradients together.
        with_gradients: keep room for gradients.
    """

    def __init__(self, group_bytes: int, *, with_gradients: bool) -> None:
        self.group_bytes = group_bytes
        self._with_gradients = with_gradients
        self._numbers = itertools.count()
        # The one that takes what is placed next, if there is room.
        self.open_group: Group | None = None
        self._homes: dict[torch.nn.Parameter, list[tuple[Group, Part]]] = {}
        self._kinds: dict[torch.nn.Parameter, tuple[Kind, ...]] = {}

    def kinds(self, param: torch.nn.Parameter) -> tuple[Kind, ...] | None:
        """Tell which state a parameter has room for; ``None`` where it has no place."""
        return self._kinds.get(param)

    def homes(self, param: torch.nn.Parameter) -> Sequence[tuple[Group, Part]]:
        """Tell where a parameter is, in the order of its elements."""
        return self._homes.get(param, ())

    def groups(self) -> list[Group]:
        """Give all groups, in order."""
        found = {group.number: group for homes in self._homes.values() for group, _ in homes}
        return [found[number] for number in sorted(found)]

    def place(self, param: torch.nn.Parameter, kinds: tuple[Kind, ...]) -> None:
        """Find a place for a parameter that has none."""
        self.remove(param)
        # It has a place when all of it has one: an interrupt may come between any two calls.
        homes = self._homes[param] = []
        block_bytes = sum(self._bytes(param, kinds, BLOCK))
        if block_bytes == 0:
            self._kinds[param] = kinds
            return
        step = max(self.group_bytes // block_bytes, 1) * BLOCK
        for begin in range(0, param.numel(), step):
            piece = Piece(param, begin, min(begin + step, param.numel()), kinds)
            state_bytes, grad_bytes = self._bytes(param, kinds, piece.count)
            group = self._with_room(state_bytes + grad_bytes)
            part = Part(piece, group.nbytes, group.grad_nbytes)
            group.nbytes += state_bytes
            group.grad_nbytes += grad_bytes
            homes.append((group, part))
            group.parts.append(part)
        self._kinds[param] = kinds

    def close(self) -> None:
        """What is placed next begins a new group."""
        self.open_group = None

    def remove(self, param: torch.nn.Parameter) -> list[Group]:
        """Take a parameter out; the groups that have no part any more."""
        self._kinds.pop(param, None)
        empty = []
        for group, part in self._homes.get(param, []):
            if part in group.parts:
                group.parts.remove(part)
            if not group.parts:
                empty.append(group)
                # What is placed next begins at its start, as in a group that has never had this parameter.
                if group is self.open_group:
                    self.open_group = None
        self._homes.pop(param, None)
        return empty

    def _bytes(self, param: torch.nn.Parameter, kinds: tuple[Kind, ...], count: int) -> tuple[int, int]:
        state = sum(kind.format.nbytes(count) for kind in kinds)
        return state, -(-count * param.dtype.itemsize // 4) * 4 if self._with_gradients else 0

    def _with_room(self, nbytes: int) -> Group:
        group = self.open_group
        is_fixed = group is None or group.is_there or group.has_grads
        if group is None or is_fixed or group.nbytes + group.grad_nbytes + nbytes > self.group_bytes:
            group = self.open_group = Group(next(self._numbers))
        return group
