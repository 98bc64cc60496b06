"""Where an optimizer's state lies.

A step asks a store for one batch of pieces after another, and changes each while it has it:

    for batch in store.batches(pieces):
        with store.lease(batch) as leases: ...

:class:`MemoryStore` has everything in memory, where torch has it, so that all pieces are one batch.
:class:`deepnvme.optim._swap_store.SwapStore` cuts parameters into pieces. It reads a batch while the one before is
worked on, and writes behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepnvme._offload.groups import OFFLOADED_STRIDE
from deepnvme._utils.strides import is_dense, row_major
from deepnvme.optim._formats import BLOCK, StateData, StateKind, decode, encode

if TYPE_CHECKING:
    from deepnvme._offload import SwapStats

MASTER = "master"
_SCALES = "_scale"


@dataclass(frozen=True, eq=False)
class ParameterSlice:
    """Some elements of a parameter, and which state they have."""

    param: torch.nn.Parameter
    begin: int
    end: int
    # Its moments, and master weights where it has those.
    kinds: tuple[StateKind, ...]

    @property
    def count(self) -> int:
        """How many elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class LeasedState:
    """What a piece has for a while: its state by name, flat, and its gradient where that was swapped, too."""

    state: dict[str, StateData]
    grad: torch.Tensor | None = None


class StateStore(Protocol):
    """Lends state, flat, to whoever makes a step."""

    def has(self, param: torch.nn.Parameter) -> bool:
        """Whether it has taken over the state of that parameter."""

    def has_kind(self, param: torch.nn.Parameter, name: str) -> bool:
        """Whether it has taken over that kind of state of a parameter."""

    def initialize(self, param: torch.nn.Parameter, state: dict[str, Any], kinds: tuple[StateKind, ...]) -> None:
        """Have state of these kinds: what ``state`` has of it, else what it begins with."""

    def discard(self, param: torch.nn.Parameter) -> None:
        """Do away with what was taken over of a parameter."""

    def read(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Give fp32 copies, flat, of what is not in the optimizer's ``state`` as torch has it."""

    def batches(self, pieces: Sequence[ParameterSlice]) -> Iterable[Sequence[ParameterSlice]]:
        """Cut the pieces into what is lent at once."""

    def lease(self, batch: Sequence[ParameterSlice]) -> AbstractContextManager[list[LeasedState]]:
        """Lend the state of a batch; it may be changed until it is given back."""

    def stats(self) -> SwapStats | None:
        """Tell what it has cost, if that is worth telling."""


class MemoryStore:
    """State in an optimizer's own ``state``, as torch has it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Of parameters that have state which is not fp32.
        self._short_kinds: dict[torch.nn.Parameter, tuple[StateKind, ...]] = {}

    def has(self, param: torch.nn.Parameter) -> bool:  # noqa: ARG002
        """Say no: the optimizer has it."""
        return False

    def has_kind(self, param: torch.nn.Parameter, name: str) -> bool:  # noqa: ARG002
        """Say no: the optimizer has it."""
        return False

    def discard(self, param: torch.nn.Parameter) -> None:
        """Nothing was taken over."""

    def initialize(self, param: torch.nn.Parameter, state: dict[str, Any], kinds: tuple[StateKind, ...]) -> None:
        """Fill what is not there, and make what is there short where it is to be."""
        for kind in kinds:
            given = state.get(kind.name)
            if given is not None:
                given = lying_as(param, given)
            elif kind.name == MASTER:
                given = param.detach().float()
            else:
                given = empty_as(param, torch.float32 if kind.initial else kind.format.dtype).fill_(kind.initial)
            scales = kind.name + _SCALES
            if kind.format.has_scales and scales not in state:
                state[scales] = torch.zeros(-(-param.numel() // BLOCK))
            kept = given
            if given.dtype != kind.format.dtype:
                kept = empty_as(param, kind.format.dtype)
                encode((flat(kept), state[scales]) if kind.format.has_scales else flat(kept), flat(given).float(), kind)
            # What was given is there until all of it is elsewhere.
            state[kind.name] = kept
        if any(kind.format.dtype != torch.float32 for kind in kinds):
            self._short_kinds[param] = kinds

    def read(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Give what is not fp32 as if it were."""
        found, state = {}, self._optimizer.state.get(param, {})
        for kind in self._short_kinds.get(param, ()):
            if kind.name in state:
                found[kind.name] = torch.empty(param.numel())
                decode(_state_data(state, kind), found[kind.name], kind)
        return found

    def batches(self, pieces: Sequence[ParameterSlice]) -> Iterable[Sequence[ParameterSlice]]:
        """All at once."""
        yield pieces

    @contextmanager
    def lease(self, batch: Sequence[ParameterSlice]) -> Iterator[list[LeasedState]]:
        """Lend what is there."""
        yield [self._one(piece) for piece in batch]

    def stats(self) -> None:
        """Nothing."""

    def _one(self, piece: ParameterSlice) -> LeasedState:
        state = self._optimizer.state[piece.param]
        return LeasedState({kind.name: _state_data(state, kind) for kind in piece.kinds})


def _state_data(state: dict[str, Any], kind: StateKind) -> StateData:
    elements = flat(state[kind.name])
    return (elements, state[kind.name + _SCALES]) if kind.format.has_scales else elements


def without_scales(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what belongs to codes of 8 bits."""
    return {name: value for name, value in state.items() if not name.endswith(_SCALES)}


def lying_as(param: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Give state in the order in which its parameter lies in memory: saved with another one, it may have another."""
    stride = stride_of(param)
    if state.stride() == stride or (state.is_contiguous() and stride == row_major(param.shape)):
        return state
    return empty_as(param, state.dtype).copy_(state)


def empty_as(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor that lies as a parameter does."""
    return torch.empty_strided(param.shape, stride_of(param), dtype=dtype, device=param.device)


def stride_of(param: torch.Tensor) -> tuple[int, ...]:
    """How a parameter lies in memory; one that is on disk just now, how it does when it is there."""
    stride: tuple[int, ...] = getattr(param, OFFLOADED_STRIDE, None) or param.stride()
    return stride


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order in which they lie in memory."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor):
        msg = f"a parameter of shape {tuple(tensor.shape)} has gaps or overlaps; pass parameter.contiguous() instead"
        raise ValueError(msg)
    return tensor.as_strided((tensor.numel(),), (1,))
