"""Store an optimizer's state, in memory or on disk.

A step leases one batch of slices after another from a store:

    for batch in store.batches(slices):
        with store.lease(batch) as leases: ...

:class:`MemoryStore` keeps the state where torch does, as one batch. :class:`deepnvme.optim._swap_store.SwapStore`
keeps it on disk: it reads a batch while the previous one is updated, and writes in the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepnvme.optim._formats import BLOCK, StateData, StateFormat, StateKind, decode, encode
from deepnvme.optim._parameter_order import empty_as, flat, has_order_of, with_strides_of

if TYPE_CHECKING:
    from deepnvme._swap import SwapStats

MASTER = "master"
_SCALES = "_scale"
# By parameter: the name of a whole tensor, and the index of the parameter's first element in it.
Shards = Mapping[torch.nn.Parameter, tuple[str, int]]


@dataclass(frozen=True, eq=False)
class ParameterSlice:
    """Some elements of a parameter, and their kinds of state."""

    param: torch.nn.Parameter
    begin: int
    end: int
    # Its moments, and master weights if it has those.
    kinds: tuple[StateKind, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class LeasedState:
    """State of a slice while it is leased: flat, by name, and its gradient if that is on disk."""

    state: dict[str, StateData]
    grad: torch.Tensor | None = None


class StateStore(Protocol):
    """Leases state to a step."""

    # Changes when state on disk gets other places.
    generation: int

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the state is gone."""

    def has(self, param: torch.nn.Parameter) -> bool:
        """Whether it holds state of that parameter."""

    def has_kind(self, param: torch.nn.Parameter, name: str) -> bool:
        """Whether it holds that kind of state of a parameter."""

    def initialise(self, param: torch.nn.Parameter, state: dict[str, Any], kinds: tuple[StateKind, ...]) -> None:
        """Take the state of these kinds from ``state``, or initialise it."""

    def follow(self, param: torch.nn.Parameter) -> None:
        """Keep the state of a parameter in its memory order, after that changed. Raise if its shape changed."""

    def discard(self, param: torch.nn.Parameter) -> None:
        """Drop the state of a parameter."""

    def read(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return fp32 copies of state that the optimizer's ``state`` does not contain in torch's format."""

    def batches(self, slices: Sequence[ParameterSlice]) -> Iterable[Sequence[ParameterSlice]]:
        """Split the slices into batches that are leased at once."""

    def lease(self, batch: Sequence[ParameterSlice]) -> AbstractContextManager[list[LeasedState]]:
        """Lease the state of a batch, which may be changed until the block ends."""

    def stats(self) -> SwapStats | None:
        """Return counters, if there are any."""


class MemoryStore:
    """State in the optimizer's own ``state``, as in torch."""

    generation = 0

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Parameters with state that is not fp32.
        self._short_kinds: dict[torch.nn.Parameter, tuple[StateKind, ...]] = {}

    def check_open(self) -> None:
        """Do nothing: memory is not closed."""

    def has(self, param: torch.nn.Parameter) -> bool:  # noqa: ARG002
        """Return False: the optimizer holds it."""
        return False

    def has_kind(self, param: torch.nn.Parameter, name: str) -> bool:  # noqa: ARG002
        """Return False: the optimizer holds it."""
        return False

    def follow(self, param: torch.nn.Parameter) -> None:
        """Do nothing: ``initialise`` does."""

    def discard(self, param: torch.nn.Parameter) -> None:
        """Do nothing: the optimizer holds the state."""

    def initialise(self, param: torch.nn.Parameter, state: dict[str, Any], kinds: tuple[StateKind, ...]) -> None:
        """Initialise missing state, and convert existing state to its format."""
        for kind in kinds:
            given = state.get(kind.name)
            if given is not None:
                if kind.format.has_scales and given.dtype == kind.format.dtype and not has_order_of(param, given):
                    # A scale is of a block of neighbours in memory.
                    values = torch.empty(param.numel())
                    decode(_state_data(state, kind), values, kind)
                    given = values.as_strided(given.shape, given.stride())
                given = with_strides_of(param, given)
            elif kind.name == MASTER:
                given = param.detach().float()
            else:
                given = empty_as(param, torch.float32 if kind.initial else kind.format.dtype).fill_(kind.initial)
            scales = kind.name + _SCALES
            if kind.format.has_scales and scales not in state:
                state[scales] = torch.zeros(-(-param.numel() // BLOCK))
            new = {kind.name: given}
            if given.dtype != kind.format.dtype:
                kept = new[kind.name] = empty_as(param, kind.format.dtype)
                if kind.format.has_scales:
                    new[scales] = torch.zeros_like(state[scales])
                encode((flat(kept), new[scales]) if kind.format.has_scales else flat(kept), flat(given).float(), kind)
            # The given state is replaced only once it is completely converted, and at once.
            state.update(new)
        if any(kind.format.dtype != torch.float32 for kind in kinds):
            self._short_kinds[param] = kinds

    def read(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return state in short formats as fp32."""
        found, state = {}, self._optimizer.state.get(param, {})
        for kind in self._short_kinds.get(param, ()):
            if kind.name in state:
                values = torch.empty(param.numel())
                decode(_state_data(state, kind), values, kind)
                # Its own order: the parameter may have got another one since the last step.
                found[kind.name] = values.as_strided(state[kind.name].shape, state[kind.name].stride())
        return found

    def batches(self, slices: Sequence[ParameterSlice]) -> Iterable[Sequence[ParameterSlice]]:
        """Yield one batch."""
        yield slices

    @contextmanager
    def lease(self, batch: Sequence[ParameterSlice]) -> Iterator[list[LeasedState]]:
        """Yield the state in memory."""
        yield [self._leased_state(one) for one in batch]

    def stats(self) -> None:
        """Return nothing."""

    def _leased_state(self, leased: ParameterSlice) -> LeasedState:
        state = self._optimizer.state[leased.param]
        return LeasedState({kind.name: _state_data(state, kind) for kind in leased.kinds})


def _state_data(state: dict[str, Any], kind: StateKind) -> StateData:
    elements = flat(state[kind.name])
    return (elements, state[kind.name + _SCALES]) if kind.format.has_scales else elements


def state_names(name: str, kept: StateFormat) -> tuple[str, ...]:
    """Return the names of a moment in the optimizer's ``state``: its own, and that of its scales if it has some."""
    return (name, name + _SCALES) if kept.has_scales else (name,)


def without_scales(state: dict[str, Any]) -> dict[str, Any]:
    """Omit the scales of 8-bit state."""
    return {name: value for name, value in state.items() if not name.endswith(_SCALES)}
