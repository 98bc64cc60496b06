"""Where an optimizer's state lies.

A step asks a store for one batch of pieces after another, in an order that is told in advance, and changes each while
it has it:

    store.schedule(pieces)
    for batch in store.batches(pieces):
        with store.lend(batch) as lent: ...
    store.flush()

:class:`MemoryStore` has everything in memory, where torch has it, so that all pieces are one batch.
:class:`deepnvme.optim._swapped.SwapStore` cuts parameters into pieces at multiples of 128 elements, reads a batch while
the one before is worked on, and writes behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from deepnvme._swap import SwapStats

MASTER = "master"


@dataclass(frozen=True, eq=False)
class Piece:
    """Some elements of a parameter, and which state they have."""

    param: torch.nn.Parameter
    begin: int
    end: int
    # The names of its moments, and of master weights where it has those.
    names: tuple[str, ...]


class StateStore(Protocol):
    """Lends state, flat and of fp32, to whoever makes a step."""

    def has(self, param: torch.nn.Parameter) -> bool:
        """Whether it has taken over the state of that parameter."""

    def begin(self, param: torch.nn.Parameter, state: dict[str, Any], names: tuple[str, ...]) -> None:
        """Have state of these names: what ``state`` has of it, else zeros, and the parameter for its master weights."""

    def forget(self, param: torch.nn.Parameter) -> None:
        """Do away with what was taken over of a parameter."""

    def gather(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Give copies of what was taken over, flat."""

    def schedule(self, pieces: Sequence[Piece]) -> None:
        """Say what the step asks for, in order."""

    def batches(self, pieces: Sequence[Piece]) -> Iterable[Sequence[Piece]]:
        """Cut the pieces into what is lent at once."""

    def lend(self, batch: Sequence[Piece]) -> AbstractContextManager[list[dict[str, torch.Tensor]]]:
        """Lend the state of a batch; it may be changed until it is given back."""

    def flush(self) -> None:
        """Return when the state is where it belongs."""

    def stats(self) -> SwapStats | None:
        """Tell what it has cost, if that is worth telling."""


class MemoryStore:
    """State in an optimizer's own ``state``, as torch has it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def has(self, param: torch.nn.Parameter) -> bool:  # noqa: ARG002
        """Say no: the optimizer has it."""
        return False

    def forget(self, param: torch.nn.Parameter) -> None:
        """Nothing was taken over."""

    def gather(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Nothing was taken over."""
        return {}

    def begin(self, param: torch.nn.Parameter, state: dict[str, Any], names: tuple[str, ...]) -> None:
        """Fill what is not there."""
        for name in names:
            if state.get(name) is not None:
                state[name] = lying_as(param, state[name])
            elif name == MASTER:
                state[name] = param.detach().float()
            else:
                state[name] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)

    def schedule(self, pieces: Sequence[Piece]) -> None:
        """Nothing has to be fetched."""

    def batches(self, pieces: Sequence[Piece]) -> Iterable[Sequence[Piece]]:
        """All at once."""
        return [pieces]

    @contextmanager
    def lend(self, batch: Sequence[Piece]) -> Iterator[list[dict[str, torch.Tensor]]]:
        """Lend the tensors themselves."""
        yield [self._one(piece) for piece in batch]

    def flush(self) -> None:
        """It is there already."""

    def stats(self) -> None:
        """Nothing."""

    def _one(self, piece: Piece) -> dict[str, torch.Tensor]:
        state = self._optimizer.state[piece.param]
        return {name: flat(state[name])[piece.begin : piece.end] for name in piece.names}


def lying_as(param: torch.nn.Parameter, state: torch.Tensor) -> torch.Tensor:
    """Give state in the order in which its parameter lies in memory: saved with another one, it may have another."""
    if state.stride() == param.stride() or (state.is_contiguous() and param.is_contiguous()):
        return state
    return torch.empty_like(param, dtype=state.dtype, memory_format=torch.preserve_format).copy_(state)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order in which they lie in memory."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    # Any order of dimensions, as long as no element is missing or there twice.
    if sorted(_dense(tensor)) != sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        msg = f"a parameter of shape {tuple(tensor.shape)} has gaps or overlaps; pass parameter.contiguous() instead"
        raise ValueError(msg)
    return tensor.as_strided((tensor.numel(),), (1,))


def _dense(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Strides and sizes as they would be without gaps, in the order of the strides that there are."""
    dense, stride = [], 1
    for _, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        dense.append((stride, size))
        stride *= size
    return dense
