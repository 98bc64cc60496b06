"""The state of parameters: its format, the order of its elements, and its store in memory or on disk.

A step leases one batch of slices after another from a store:

    for batch in store.batches(slices):
        with store.lease(batch) as leases: ...

:class:`MemoryStore` keeps the state where torch does, as one batch. :class:`deepnvme.optim._swap_store.SwapStore`
keeps it on disk: it reads a batch while the previous one is updated, and writes in the background.
`crates/deepnvme-optim/src/moment.rs` defines the values of the short formats, and why they suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from deepnvme._deepnvme import Kernel
from deepnvme._modules.weight_classes import ON_DISK_STRIDE
from deepnvme._utils.shards import from_local, local, split_as
from deepnvme._utils.tensors import MemoryOrder, is_dense, row_major
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from deepnvme._swap import SwapStats

MASTER = "master"
_SCALES = "_scale"
# By parameter: the name of a whole tensor, and the index of the parameter's first element in it.
Shards = Mapping[torch.nn.Parameter, tuple[str, int]]
# Elements that share a scale. The kernel's blocks begin at multiples of it.
BLOCK = 128
# State in memory: numbers, or codes and scales.
StateData: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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
                    codes = local(given)
                    values = torch.empty(codes.numel())
                    decode(_state_data(state, kind), values, kind)
                    given = from_local(param, values.as_strided(codes.shape, codes.stride()))
                given = with_strides_of(param, given)
            elif kind.name == MASTER:
                given = param.detach().float()
            else:
                given = empty_as(param, torch.float32 if kind.initial else kind.format.dtype).fill_(kind.initial)
            scales = kind.name + _SCALES
            if kind.format.has_scales and scales not in state:
                state[scales] = torch.zeros(-(-local(param).numel() // BLOCK))
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
                kept = local(state[kind.name])
                values = torch.empty(kept.numel())
                decode(_state_data(state, kind), values, kind)
                # Its own order: the parameter may have got another one since the last step.
                found[kind.name] = from_local(param, values.as_strided(kept.shape, kept.stride()))
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


@dataclass(frozen=True)
class StateFormat:
    """A memory format for numbers.

    ``dtype`` is the element type. 8-bit elements have scales in addition.
    """

    name: str
    dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        """Whether it consists of codes and scales."""
        return self.dtype == torch.uint8

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` elements, a multiple of four, so that the next state is aligned."""
        return self.scales_begin(count) + (-(-count // BLOCK) * 4 if self.has_scales else 0)

    def scales_begin(self, count: int) -> int:
        """Offset of the scales, which follow the elements."""
        return -(-count * self.dtype.itemsize // 4) * 4

    def view(self, memory: torch.Tensor, count: int) -> StateData:
        """View ``nbytes(count)`` bytes as state."""
        elements = memory[: count * self.dtype.itemsize].view(self.dtype)
        if not self.has_scales:
            return elements
        return elements, memory[self.scales_begin(count) :].view(torch.float32)

    def make(self, count: int) -> StateData:
        """Allocate state of zeros."""
        return self.view(torch.zeros(self.nbytes(count), dtype=torch.uint8), count)


FP32 = StateFormat("fp32", torch.float32)
BF16 = StateFormat("bf16", torch.bfloat16)
EIGHT_BIT = StateFormat("8bit", torch.uint8)
FORMATS = {one.name: one for one in (FP32, BF16, EIGHT_BIT)}


@dataclass(frozen=True)
class StateKind:
    """A kind of state: its name, format and initial value."""

    name: str
    format: StateFormat = FP32
    # Squares, which have no sign.
    squares: bool = False
    # Initial value of the elements.
    initial: float = 0.0


def part_of(kept: StateData, begin: int, end: int) -> StateData:
    """View some elements of state. ``begin`` is a multiple of ``BLOCK``."""
    if isinstance(kept, torch.Tensor):
        return kept[begin:end]
    codes, scales = kept
    return codes[begin:end], scales[begin // BLOCK : -(-end // BLOCK)]


def encode(kept: StateData, values: torch.Tensor, kind: StateKind) -> None:
    """Encode fp32 numbers as the nearest values of the format."""
    if isinstance(kept, torch.Tensor) and kept.dtype == torch.float32:
        kept.copy_(values)
    else:
        Kernel.pack(values.contiguous(), kept, kind.squares)


def decode(kept: StateData, out: torch.Tensor, kind: StateKind) -> None:
    """Decode state to fp32. Encoding the result again is lossless."""
    if isinstance(kept, torch.Tensor) and kept.dtype == torch.float32:
        out.copy_(kept)
    else:
        Kernel.unpack(kept, out, kind.squares)


def with_strides_of(param: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return state split and in memory order as its parameter. Saved state may differ in both."""
    state = split_as(param, state)
    return state if has_order_of(param, state) else empty_as(param, state.dtype).copy_(state)


def has_order_of(param: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether state has the memory order of its parameter."""
    stride, own = stride_of(param), local(state)
    return own.stride() == stride or (own.is_contiguous() and stride == row_major(local(param).shape))


def empty_as(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor with the memory order of a parameter."""
    made = torch.empty_strided(local(param).shape, stride_of(param), dtype=dtype, device=param.device)
    return from_local(param, made)


def stride_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter; of one on disk, the strides it has in memory."""
    stride: tuple[int, ...] = getattr(param, ON_DISK_STRIDE, None) or local(param).stride()
    return stride


def order_of(param: torch.Tensor) -> MemoryOrder:
    """Return the memory order of a parameter; of one on disk, the order it has in memory."""
    return MemoryOrder.of(local(param).shape, stride_of(param))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View all elements that this process has in memory order."""
    tensor = local(tensor).detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not is_dense(tensor):
        msg = f"a parameter of shape {tuple(tensor.shape)} has gaps or overlaps; pass parameter.contiguous() instead"
        raise InvalidArgumentError(msg)
    return tensor.as_strided((tensor.numel(),), (1,))
