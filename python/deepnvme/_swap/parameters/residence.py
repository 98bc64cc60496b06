"""Units in memory for as long as somebody needs them: what parameters show, and the order in which they are needed."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from deepnvme._swap.parameters.units import OFFLOADED_STRIDE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deepnvme._swap.parameters.units import Unit
    from deepnvme._swap.swapper import Lend, Swapper

# Lends that are remembered until the order is known. No step of a real model has as many.
_TRACE_MAX = 1 << 20


class Holder:
    """Somebody who needs units. One that is gone needs none: an interrupt may come where it would release them."""


@dataclass(frozen=True)
class _Held:
    lend: Lend
    memory: torch.Tensor
    holders: WeakSet[Holder]


class Residence:
    """Shows parameters while they are held.

    Args:
        swapper: has the units.
        units: all of them.
    """

    def __init__(self, swapper: Swapper, units: Iterable[Unit]) -> None:
        self.swapper = swapper
        self._lock = threading.RLock()
        self._held: dict[Unit, _Held] = {}
        # How often each was held to be changed.
        self._versions: dict[Unit, int] = {}
        self._trace: list[str] = []
        self._order: list[str] = []
        # Shape and dtype of what is on disk, in no memory: a number that is none, so that nobody computes with it
        # unnoticed.
        self._absent = {
            member: torch.full((), float("nan"), dtype=member.dtype).expand(member.shape)
            if member.dtype.is_floating_point or member.dtype.is_complex
            else torch.zeros((), dtype=member.dtype).expand(member.shape)
            for unit in units
            for member in unit.members
        }

    def put(self, unit: Unit) -> None:
        """Take over what the parameters of a unit have, and free that."""
        flat = torch.zeros(unit.nbytes, dtype=torch.uint8)
        for member in unit.members:
            member.view(flat).copy_(member.parameter.data)
            setattr(member.parameter, OFFLOADED_STRIDE, member.stride)
        self.swapper.put(unit.key, flat)
        self._show(unit, None)

    @contextmanager
    def held(self, units: Iterable[Unit], *, exclusive: bool = False) -> Iterator[None]:
        """Have units in memory for a ``with`` block.

        To change them, nobody else may hold them.

        Raises:
            RuntimeError: one is to be changed, and held already.
        """
        holder = Holder()
        try:
            for unit in units:
                self.hold(unit, holder, exclusive=exclusive)
            yield
        finally:
            self.release(holder)

    def hold(self, unit: Unit, holder: Holder, *, exclusive: bool = False) -> None:
        """Have the parameters of a unit in memory until its holder releases it, or is gone.

        Raises:
            RuntimeError: it is to be changed, and held already.
        """
        with self._lock:
            found = self._held.get(unit)
            if found is not None and not found.holders:
                self._drop(unit)
            elif found is not None:
                if exclusive:
                    raise RuntimeError(f"{unit.members[0].name} is in use, and cannot be changed now")
                found.holders.add(holder)
                return
            if len(self._trace) < _TRACE_MAX:
                self._trace.append(unit.key)
        lend = self.swapper.lend(unit.key, shared=not exclusive)
        memory = lend.__enter__()
        try:
            with self._lock:
                self._held[unit] = _Held(lend, memory, WeakSet([holder]))
                if exclusive:
                    self._versions[unit] = self.version(unit) + 1
                self._show(unit, memory)
        except BaseException:
            # Whoever is interrupted here has nothing to release.
            self._held.pop(unit, None)
            self._show(unit, None)
            lend.release()
            raise

    def release(self, holder: Holder) -> None:
        """Release all that it holds, which may be nothing."""
        with self._lock:
            for unit in [unit for unit, one in self._held.items() if holder in one.holders]:
                one = self._held[unit]
                if len(one.holders) == 1:
                    self._drop(unit)
                one.holders.discard(holder)

    def release_lost(self) -> None:
        """Release the units of holders that are gone: an interrupt came where they would have released them."""
        with self._lock:
            for unit in [unit for unit, one in self._held.items() if not one.holders]:
                self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        try:
            self._show(unit, None)
        except BaseException:
            # No parameter shows memory that is about to be another one's.
            self._show(unit, None)
            raise
        finally:
            self._held.pop(unit).lend.release()

    def version(self, unit: Unit) -> int:
        """Another number after each change."""
        return self._versions.get(unit, 0)

    def is_held(self, unit: Unit) -> bool:
        """Whether its parameters are in memory for somebody."""
        found = self._held.get(unit)
        return found is not None and bool(found.holders)

    def find(self, units: Iterable[Unit], address: int) -> tuple[Unit, int] | None:
        """Find the unit of which this is the address of a byte, and which byte."""
        for unit in units:
            held = self._held.get(unit)
            if held is not None and 0 <= address - held.memory.data_ptr() < unit.nbytes:
                return unit, address - held.memory.data_ptr()
        return None

    def memory(self, unit: Unit) -> torch.Tensor:
        """The bytes of a unit that is held."""
        return self._held[unit].memory

    def next_step(self) -> None:
        """A step has begun: what the last one needed, in that order, is what this one will need."""
        with self._lock:
            trace, self._trace = self._trace, []
            is_new = trace != self._order and len(trace) > 1
            if is_new:
                self._order = trace
        if is_new:
            self.swapper.schedule(trace, repeat=True)

    def restore(self, unit: Unit) -> None:
        """Give the parameters of a unit memory of their own again."""
        with self.swapper.lend(unit.key, shared=True) as memory, torch.no_grad():
            for member in unit.members:
                member.parameter.data = member.view(memory).clone()
                if hasattr(member.parameter, OFFLOADED_STRIDE):
                    delattr(member.parameter, OFFLOADED_STRIDE)

    def _show(self, unit: Unit, memory: torch.Tensor | None) -> None:
        for member in unit.members:
            member.parameter.data = self._absent[member] if memory is None else member.view(memory)
