"""State on disk, in groups that are read, changed and written back one behind the other."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._sizes import parse_bytes
from deepnvme._swap import Swapper
from deepnvme.optim._store import MASTER, Piece, flat, lying_as

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from deepnvme._swap import SwapStats

# Where a parameter is cut: the kernel's blocks begin at multiples of this many elements.
_GRAIN = 128
# A group has at most that part of the memory, so that the next are read and the last written while one is changed.
_GROUP_SHARE, _GROUP_BYTES_MAX = 8, 64 << 20
_ITEM_BYTES = 4


@dataclass(eq=False)
class _Part:
    """Some elements of a parameter, and where in its group each kind of state begins."""

    piece: Piece
    offset: int

    def bytes_of(self, name: str) -> tuple[int, int]:
        """From where to where that state is."""
        count = (self.piece.end - self.piece.begin) * _ITEM_BYTES
        start = self.offset + self.piece.names.index(name) * count
        return start, start + count


@dataclass(eq=False)
class _Group:
    """What is read and written at once."""

    key: str
    parts: list[_Part] = field(default_factory=list)


class SwapStore:
    """State in a swap file, under a bound of memory.

    Args:
        swap_dir: where the swap file is made; several folders, one for each disk.
        memory: bytes of state that are in memory at a time.
        checksums: keep a checksum of all that is written, and compare it with what is read.
    """

    def __init__(
        self, swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], memory: str | int, *, checksums: bool
    ) -> None:
        nbytes = parse_bytes(memory)
        self._swapper = Swapper(swap_dir, memory=nbytes, checksums=checksums)
        self._group_bytes = min(nbytes // _GROUP_SHARE, _GROUP_BYTES_MAX)
        self._numbers = itertools.count()
        # Pieces that are in no group yet, and what is known of their state.
        self._waiting: list[tuple[Piece, Mapping[str, torch.Tensor]]] = []
        self._waiting_bytes = 0
        # In which groups the state of a parameter is, in order.
        self._homes: dict[torch.nn.Parameter, list[tuple[_Group, _Part]]] = {}
        self._names: dict[torch.nn.Parameter, tuple[str, ...]] = {}
        # What was lent since the same was lent the last time, which is a step, by the first piece of each batch: two
        # groups of parameters may share one here.
        self._trace: dict[Piece, str] = {}
        self._order: list[str] = []

    def stats(self) -> SwapStats:
        """Tell what it has cost so far."""
        return self._swapper.stats()

    def has(self, param: torch.nn.Parameter) -> bool:
        """Whether there is state of that parameter."""
        return param in self._homes

    def begin(self, param: torch.nn.Parameter, state: dict[str, Any], names: tuple[str, ...]) -> None:
        """Take over state: what ``state`` has of it, else zeros, and the parameter for its master weights."""
        if self._names.get(param) == names and not any(name in state for name in names):
            return
        # Other names than before: a group's settings were changed in the middle.
        before = self.gather(param) if param in self._homes else {}
        self.forget(param)
        given = {name: flat(lying_as(param, state.pop(name))) for name in names if state.get(name) is not None}
        given = {**{name: tensor.view(-1) for name, tensor in before.items() if name in names}, **given}
        self._names[param], self._homes[param] = names, []
        if not names:
            return
        step = max(self._group_bytes // (_ITEM_BYTES * len(names)) // _GRAIN, 1) * _GRAIN
        for begin in range(0, param.numel(), step):
            piece = Piece(param, begin, min(begin + step, param.numel()), names)
            nbytes = _bytes_of(piece)
            if self._waiting_bytes + nbytes > self._group_bytes:
                self._settle()
            self._waiting.append((piece, given))
            self._waiting_bytes += nbytes

    def forget(self, param: torch.nn.Parameter) -> None:
        """Do away with the state of a parameter."""
        if param not in self._homes:
            return
        self._settle()
        for group, part in self._homes.pop(param):
            group.parts.remove(part)
            if not group.parts:
                self._swapper.forget(group.key)
        self._names.pop(param, None)

    def gather(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Read the state of a parameter into memory of its own; flat, in the order of the parameter's memory."""
        self._settle()
        names = self._names.get(param, ())
        found = {name: torch.empty(param.numel(), dtype=torch.float32) for name in names}
        for group, part in self._homes.get(param, []):
            for name in names:
                start, _ = part.bytes_of(name)
                self._swapper.read(group.key, start, found[name][part.piece.begin : part.piece.end])
        return found

    def schedule(self, pieces: Sequence[Piece]) -> None:
        """Nothing to do: a step asks for what the step before has asked for."""

    def batches(self, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        """Cut the pieces, which are whole parameters, as they lie in groups."""
        self._settle()
        wanted = {piece.param for piece in pieces}
        groups = dict.fromkeys(group for piece in pieces for group, _ in self._homes[piece.param])
        for group in groups:
            yield [part.piece for part in group.parts if part.piece.param in wanted]
        # What has no state at all.
        bare = [piece for piece in pieces if not piece.names or not self._homes[piece.param]]
        if bare:
            yield bare

    @contextmanager
    def lend(self, batch: Sequence[Piece]) -> Iterator[list[dict[str, torch.Tensor]]]:
        """Lend the state of one batch."""
        homes = self._homes[batch[0].param]
        group = next((group for group, part in homes if part.piece is batch[0]), None)
        if group is None:
            yield [{} for _ in batch]
            return
        self._follow(batch[0], group.key)
        with self._swapper.lend(group.key) as memory:
            parts = {id(part.piece): part for part in group.parts}
            yield [_views(memory, parts[id(piece)]) for piece in batch]

    def flush(self) -> None:
        """What was changed is written behind the next step."""

    def close(self) -> None:
        """End it; the state is gone."""
        self._swapper.close()

    def _follow(self, first: Piece, key: str) -> None:
        if first in self._trace:
            order, self._trace = [*self._trace.values()], {}
            if order != self._order:
                self._order = order
                self._swapper.schedule(order, repeat=True)
        self._trace[first] = key

    def _settle(self) -> None:
        """Put what waits into a group of its own."""
        if not self._waiting:
            return
        waiting, nbytes = self._waiting, self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0
        group = _Group(f"state.{next(self._numbers)}")
        memory, at = torch.zeros(nbytes, dtype=torch.uint8), 0
        for piece, given in waiting:
            part = _Part(piece, at)
            for name, view in _views(memory, part).items():
                if name in given:
                    view.copy_(given[name][piece.begin : piece.end])
                elif name == MASTER:
                    view.copy_(flat(piece.param)[piece.begin : piece.end])
            group.parts.append(part)
            at += _bytes_of(piece)
        self._swapper.put(group.key, memory)
        for part in group.parts:
            self._homes[part.piece.param].append((group, part))


def _bytes_of(piece: Piece) -> int:
    return (piece.end - piece.begin) * _ITEM_BYTES * len(piece.names)


def _views(memory: torch.Tensor, part: _Part) -> dict[str, torch.Tensor]:
    found = {}
    for name in part.piece.names:
        start, end = part.bytes_of(name)
        found[name] = memory[start:end].view(torch.float32)
    return found
