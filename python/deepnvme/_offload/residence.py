"""Units in memory for as long as somebody needs them: what parameters show, and the order in which they are needed."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from deepnvme._offload.groups import OFFLOADED_STRIDE
from deepnvme._offload.placeholders import Absent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deepnvme._offload.groups import Unit
    from deepnvme._offload.swapper import Swapper
    from deepnvme._offload.view import Lend

# Lends that are remembered until the order is known. No step of a real model has as many.
_TRACE_MAX = 1 << 20


class Holder:
    """Somebody who needs units. One that is gone needs none: an interrupt may come where it would release them."""


@dataclass(frozen=True)
class _Held:
    lend: Lend
    memory: torch.Tensor
    holders: WeakSet[Holder]
    # What torch counted of changes of each parameter, where none may be changed.
    changes: tuple[int, ...] | None


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
        self._absent = {member: Absent(member) for unit in units for member in unit.members}
        self._restored: set[Unit] = set()

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
            RuntimeError: it is to be changed, and held already; or a parameter was changed while it was on disk.
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
            self._check_absent(unit)
            if len(self._trace) < _TRACE_MAX:
                self._trace.append(unit.key)
        lend = self.swapper.lend(unit.key, shared=not exclusive)
        memory = lend.__enter__()
        mine = None
        try:
            with self._lock:
                found = self._held.get(unit)
                if found is not None and found.holders:
                    # Another thread has brought it meanwhile, and both read it.
                    found.holders.add(holder)
                else:
                    mine = _Held(lend, memory, WeakSet([holder]), None if exclusive else _changes_of(unit))
                    self._held[unit] = mine
                    if exclusive:
                        self._versions[unit] = self.version(unit) + 1
                    self._show(unit, memory)
        except BaseException:
            # Whoever is interrupted here has nothing to release.
            with self._lock:
                if mine is not None and self._held.get(unit) is mine:
                    self._held.pop(unit)
                    self._show(unit, None)
            lend.release()
            raise
        if mine is None:
            lend.release()

    def release(self, holder: Holder) -> None:
        """Release all that it holds, which may be nothing.

        Raises:
            RuntimeError: a parameter was changed, and not held for that.
        """
        lost: str | None = None
        with self._lock:
            for unit in [unit for unit, one in self._held.items() if holder in one.holders]:
                one = self._held[unit]
                if len(one.holders) == 1:
                    lost = lost or _lost(unit, one)
                    self._drop(unit)
                one.holders.discard(holder)
        if lost is not None:
            raise RuntimeError(
                f"{lost} was changed while it was in memory to be read, and the change is lost; change it within "
                "offloading.gathered(..., write=True)"
            )

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
        """Give the parameters of a unit memory of their own again.

        Raises:
            RuntimeError: a parameter was changed while it was on disk.
        """
        if unit in self._restored:
            return
        self._check_absent(unit)
        with self.swapper.lend(unit.key, shared=True) as memory, torch.no_grad():
            for member in unit.members:
                member.parameter.data = member.view(memory).clone()
                if hasattr(member.parameter, OFFLOADED_STRIDE):
                    delattr(member.parameter, OFFLOADED_STRIDE)
        self._restored.add(unit)

    def _check_absent(self, unit: Unit) -> None:
        """Refuse to go on, once, where somebody has changed what stands for a parameter on disk."""
        changed = [member for member in unit.members if self._absent[member].is_changed()]
        if not changed:
            return
        for member in changed:
            self._absent[member].mend()
        raise RuntimeError(
            f"{changed[0].name} was changed while it was on disk, and the change is lost; change it within "
            "offloading.gathered(..., write=True), or give the model back first with offloading.close()"
        )

    def _show(self, unit: Unit, memory: torch.Tensor | None) -> None:
        for member in unit.members:
            if memory is None:
                self._absent[member].show()
            else:
                member.parameter.data = member.view(memory)


def _changes_of(unit: Unit) -> tuple[int, ...]:
    return tuple(member.parameter._version for member in unit.members)  # noqa: SLF001


def _lost(unit: Unit, held: _Held) -> str | None:
    """Name a parameter that was changed, and not held for that."""
    if held.changes is None:
        return None
    pairs = zip(held.changes, _changes_of(unit), strict=True)
    return next((member.name for member, (then, now) in zip(unit.members, pairs, strict=True) if then != now), None)
