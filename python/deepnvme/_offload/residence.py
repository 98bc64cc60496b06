"""Hold groups in memory while somebody needs them, put placeholders in their place otherwise, and learn their order."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import nn

from deepnvme._modules.weight_classes import (
    ON_DISK_NAME,
    ON_DISK_STRIDE,
    BoundParameter,
    OnDiskParameter,
    on_disk_message,
)
from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.tensors import without_memory, without_override
from deepnvme.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deepnvme._offload.groups import Member, ParameterGroup
    from deepnvme._swap.shared import SwapperPart
    from deepnvme._swap.swapper import Swapper
    from deepnvme._swap.values import Borrowed

# Maximum length of the recorded order. No step of a real model is as long.
_TRACE_MAX = 1 << 20
# Words of 8 bytes that are summed at a time.
_FINGERPRINT_ELEMENTS = 1 << 17
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Holder:
    """Somebody who needs groups. A garbage-collected holder needs none, since an interrupt may prevent its release."""

    thread: int | None = None
    """For the holder of a call of ours: its thread. The traceback of an interrupt may keep such a holder alive."""


@dataclass(frozen=True)
class _Held:
    borrow: Borrowed
    memory: torch.Tensor
    holders: WeakSet[Holder]
    # torch's version counter of each parameter, if changes are not allowed.
    changes: tuple[int, ...] | None


class Residence:
    """Binds parameters to memory while they are held.

    Args:
        swapper: contains the groups.
        groups: all groups.
    """

    def __init__(self, swapper: Swapper | SwapperPart, groups: Iterable[ParameterGroup]) -> None:
        self.swapper = swapper
        self._lock = make_lock()
        self._held: dict[ParameterGroup, _Held] = {}
        # How often each group was held for writing.
        self._versions: dict[ParameterGroup, int] = {}
        self._trace: list[str] = []
        self._order: list[str] = []
        self._placeholders = {member: ParameterPlaceholder(member) for group in groups for member in group.members}
        # Groups whose values are on disk; those whose parameters all are placeholders as well; and those that are back.
        self._stored: set[ParameterGroup] = set()
        self._offloaded: set[ParameterGroup] = set()
        self._restored: set[ParameterGroup] = set()
        # Running calls and `gathered` blocks in each thread. Changed without calls: Ctrl-C cannot come in between.
        self.calls: dict[int, int] = {}
        self.gathered_depths: dict[int, int] = {}

    def offload(self, group: ParameterGroup) -> None:
        """Move the parameters of a group to disk and free their memory. ``restore`` undoes it, even half of it."""
        flat = torch.zeros(group.nbytes, dtype=torch.uint8)
        for member in group.members:
            member.view(flat).copy_(member.parameter.data)
        self.swapper.put(group.key, flat)
        self._stored.add(group)
        for member in group.members:
            setattr(member.parameter, ON_DISK_STRIDE, member.stride)
            setattr(member.parameter, ON_DISK_NAME, member.name)
        self._bind(group, None)
        self._offloaded.add(group)

    @contextmanager
    def held(
        self, groups: Iterable[ParameterGroup], *, exclusive: bool = False, is_users: bool = False
    ) -> Iterator[None]:
        """Hold groups for a ``with`` block.

        Exclusive holders may change them. ``is_users``: the block is the user's, which may contain calls of ours.

        Raises:
            RuntimeError: exclusive access was requested and a group is in use.
        """
        holder = Holder()
        holder.thread = None if is_users else threading.get_ident()
        try:
            for group in groups:
                self.hold(group, holder, exclusive=exclusive, is_users=is_users)
            yield
        finally:
            self.release(holder)

    def hold(self, group: ParameterGroup, holder: Holder, *, exclusive: bool = False, is_users: bool = False) -> None:
        """Keep a group's parameters in memory until its holder releases it or is gone.

        Raises:
            RuntimeError: exclusive access was requested and it is in use; or a parameter was changed while it was on
                disk.
        """
        with self._lock:
            if group in self._restored:
                return
            found = self._held.get(group)
            if found is not None and not found.holders:
                self._drop(group)
            elif found is not None:
                if exclusive:
                    raise RuntimeError(
                        f"{group.members[0].name} is in use and cannot be changed now; change it when the running pass "
                        "or the other block of gathered has ended"
                    )
                found.holders.add(holder)
                return
            self._check_placeholders(group)
            if len(self._trace) < _TRACE_MAX:
                self._trace.append(group.key)
        # A block of the user compares the bytes. Its new parameters must not share the counters of changes.
        self._load(group, holder, exclusive=exclusive, counts_data=not (exclusive or is_users))

    def _load(self, group: ParameterGroup, holder: Holder, *, exclusive: bool, counts_data: bool) -> None:
        """Load a group that nobody held, and bind its parameters."""
        borrow = self.swapper.borrow(group.key, shared=not exclusive)
        mine = None
        try:
            # Inside: the traceback of an interrupt may keep it alive.
            try:
                memory = borrow.__enter__()
            except ClosedError:
                # Another thread has closed the offloading, after all parameters were back in memory.
                if group in self._restored:
                    return
                raise
            with self._lock:
                found = self._held.get(group)
                if group in self._restored:
                    # Another thread has given the parameters memory of their own in the meantime.
                    pass
                elif found is not None and found.holders:
                    # Another thread has loaded it in the meantime. Both share it for reading.
                    found.holders.add(holder)
                else:
                    mine = _Held(borrow, memory, WeakSet([holder]), None if exclusive else _versions_of(group))
                    self._held[group] = mine
                    if exclusive:
                        self._versions[group] = self.version(group) + 1
                    self._bind(group, memory, counts_data=counts_data)
        except BaseException:
            # The interrupted caller holds nothing, so release it here.
            with self._lock:
                if mine is not None and self._held.get(group) is mine:
                    self._held.pop(group)
                    self._bind(group, None)
            mine = None
            raise
        finally:
            if mine is None:
                borrow.release()

    def release(self, holder: Holder) -> None:
        """Release everything that a holder holds, possibly nothing.

        Raises:
            RuntimeError: a parameter was changed without exclusive access.
        """
        lost: str | None = None
        with self._lock:
            for group in [group for group, one in self._held.items() if holder in one.holders]:
                one = self._held[group]
                if len(one.holders) == 1:
                    lost = self._take_assigned(group, one) or lost or _changed_parameter(group, one)
                    # Nobody holds it from here on, so that the next one releases it if an interrupt comes now.
                    one.holders.discard(holder)
                    self._drop(group)
                one.holders.discard(holder)
        if lost is not None:
            raise RuntimeError(
                f"{lost} was changed without exclusive access, and the change may be lost at any time; change it "
                "within offloading.gathered(..., write=True), and load the state again"
            )

    def release_unheld(self) -> None:
        """Release the groups of holders that an interrupt has left: no call of ours runs in this thread."""
        thread = threading.get_ident()
        with self._lock:
            for one in self._held.values():
                for holder in [holder for holder in one.holders if holder.thread == thread]:
                    one.holders.discard(holder)
            for group in [group for group, one in self._held.items() if not one.holders]:
                self._drop(group)

    def _take_assigned(self, group: ParameterGroup, held: _Held) -> str | None:
        """Copy data that was assigned to a parameter (``p.data = ...``) to its place.

        Returns:
            The name of a parameter for which that is not allowed, or whose shape or dtype changed.
        """
        lost, begin = None, held.memory.data_ptr()
        for member in group.members:
            parameter = member.parameter
            fits = parameter.shape == member.shape and parameter.dtype == member.dtype
            if fits and parameter.data_ptr() == begin + member.offset:
                continue
            if fits and held.changes is None:
                member.view(held.memory).copy_(parameter.data)
            else:
                lost = member.name
        return lost

    def _drop(self, group: ParameterGroup) -> None:
        try:
            self._bind(group, None)
        except BaseException:
            # No parameter may keep pointing at memory that is about to be reused.
            self._bind(group, None)
            raise
        finally:
            self._held[group].borrow.release()
            self._held.pop(group)

    def version(self, group: ParameterGroup) -> int:
        """Return a number that differs after each change."""
        return self._versions.get(group, 0)

    def is_held(self, group: ParameterGroup) -> bool:
        """Whether somebody holds the group."""
        found = self._held.get(group)
        return found is not None and bool(found.holders)

    def find(self, groups: Iterable[ParameterGroup], address: int) -> tuple[ParameterGroup, int] | None:
        """Find the group that contains an address, and the offset in it."""
        for group in groups:
            held = self._held.get(group)
            if held is not None and 0 <= address - held.memory.data_ptr() < group.nbytes:
                return group, address - held.memory.data_ptr()
        return None

    def memory(self, group: ParameterGroup) -> torch.Tensor:
        """Return the bytes of a held group.

        Raises:
            ClosedError: its parameters have memory of their own again.
            RuntimeError: another thread has released it.
        """
        with self._lock:
            held = self._held.get(group)
            is_restored = group in self._restored
        if held is not None:
            return held.memory
        name = group.members[0].name
        if is_restored:
            raise ClosedError(
                f"offloading was closed before the backward pass that needs {name}; run the forward pass again"
            )
        raise RuntimeError(
            f"{name} was released during the backward pass, because another thread began a pass or closed the "
            "offloading; run the passes of one model in one thread"
        )

    def next_step(self) -> None:
        """Start a step: schedule the groups in the order of the previous step."""
        with self._lock:
            trace, self._trace = self._trace, []
            is_new = trace != self._order and len(trace) > 1
            if is_new:
                self._order = trace
        if is_new:
            self.swapper.schedule(trace, repeat=True)

    def restore(self, group: ParameterGroup) -> None:
        """Give a group's parameters memory of their own again.

        Raises:
            RuntimeError: another thread uses it; or a parameter was changed while it was on disk.
        """
        if group in self._restored:
            return
        if group not in self._stored:
            # Its parameters have never lost their memory.
            self._restored.add(group)
            return
        with self._lock:
            self._refuse_use(group)
            if group in self._offloaded:
                self._check_placeholders(group)
        with self.swapper.borrow(group.key, shared=True) as memory:
            # Without the lock, since others need it to release memory.
            copies = [member.view(memory).clone() for member in group.members]
            with self._lock:
                self._refuse_use(group)
                # From here on not all are placeholders, if an interrupt comes.
                self._offloaded.discard(group)
                for member, copy in zip(group.members, copies, strict=True):
                    self._placeholders[member].remove(copy)
                    for attribute in (ON_DISK_STRIDE, ON_DISK_NAME):
                        vars(member.parameter).pop(attribute, None)
                self._restored.add(group)

    def _refuse_use(self, group: ParameterGroup) -> None:
        if self.is_held(group):
            raise RuntimeError(
                f"{group.members[0].name} is in use by a pass, a save or a `gathered` block; call offloading.close() "
                "again when that has ended"
            )

    def _check_placeholders(self, group: ParameterGroup) -> None:
        """Raise, once, if a placeholder was changed."""
        changed = [member for member in group.members if self._placeholders[member].is_changed()]
        if not changed:
            return
        for member in changed:
            self._placeholders[member].repair()
        raise RuntimeError(
            f"{changed[0].name} was changed while it was on disk, and the change is lost; change it within "
            "offloading.gathered(..., write=True), or call offloading.close() first"
        )

    def _bind(self, group: ParameterGroup, memory: torch.Tensor | None, *, counts_data: bool = False) -> None:
        for member in group.members:
            if memory is None:
                self._placeholders[member].install()
            else:
                self._placeholders[member].lend(member.view(memory), is_counted=counts_data)


def fingerprint(memory: torch.Tensor) -> tuple[int, int]:
    """Return two sums over memory, of which the second depends on places: to notice changes, not attacks."""
    whole = memory.numel() // 8 * 8
    words, rest = memory[:whole].view(torch.int64), memory[whole:].to(torch.int64)
    places = torch.arange(1, min(len(words), _FINGERPRINT_ELEMENTS) + 1)
    total = placed = 0
    for number, part in enumerate((*torch.split(words, _FINGERPRINT_ELEMENTS), rest)):
        total += int(part.sum())
        placed += (number + 1) * int((part * places[: len(part)]).sum() if len(part) <= len(places) else part.sum())
    return total, placed


def _versions_of(group: ParameterGroup) -> tuple[int, ...]:
    return tuple(member.parameter._version for member in group.members)  # noqa: SLF001


def _changed_parameter(group: ParameterGroup, held: _Held) -> str | None:
    """Return the name of a parameter that was changed without exclusive access."""
    if held.changes is None:
        return None
    pairs = zip(held.changes, _versions_of(group), strict=True)
    return next((member.name for member, (then, now) in zip(group.members, pairs, strict=True) if then != now), None)


class ParameterPlaceholder:
    """Stands for a parameter on disk.

    It has no memory, so that code that bypasses ``OnDiskParameter`` gets an error too. Where torch cannot make such a
    tensor, it is one NaN, expanded to the parameter's shape.
    """

    def __init__(self, member: Member) -> None:
        self._parameter = member.parameter
        self._kind = type(member.parameter)
        # `torch.utils.swap_tensors` would exchange hooks and memory. It refuses parameters with a weak reference.
        self._reference: weakref.ref[nn.Parameter] | None = None
        message = on_disk_message(member.name, "It was read or changed")
        bare = without_memory(member.shape, member.stride, member.dtype, message)
        has_nan = member.dtype.is_floating_point or member.dtype.is_complex
        number = torch.full((1,), float("nan") if has_nan else 0, dtype=member.dtype)
        self._number = number.view(torch.uint8) if bare is None else None
        self._bytes = number.view(torch.uint8).clone()
        self._data = number[0].expand(member.shape) if bare is None else bare

    def install(self) -> None:
        """Point the parameter at the placeholder."""
        self._point_at(self._data, OnDiskParameter)
        # `OnDiskParameter` refuses to be swapped with a better message.
        is_of_ours = type(self._parameter) is OnDiskParameter
        self._reference = None if is_of_ours else weakref.ref(self._parameter)

    def lend(self, data: torch.Tensor, *, is_counted: bool) -> None:
        """Point the parameter at memory that later belongs to others.

        Args:
            data: views the memory.
            is_counted: count changes of the parameter's ``data``. torch does not.
        """
        self._reference = weakref.ref(self._parameter)
        self._point_at(data, BoundParameter if is_counted else nn.Parameter)

    def remove(self, data: torch.Tensor) -> None:
        """Give the parameter memory of its own."""
        self._point_at(data, nn.Parameter)
        self._reference = None

    def _point_at(self, data: torch.Tensor, kind: type[nn.Parameter]) -> None:
        self._parameter.__class__ = self._kind
        self._parameter.data = data
        if self._kind is nn.Parameter:
            self._parameter.__class__ = kind

    def is_changed(self) -> bool:
        """Whether the parameter got other data, or the placeholder's number another value."""
        data, expected = without_override(_DATA, self._parameter), self._data
        if (data.dtype, data.shape) != (expected.dtype, expected.shape):
            return True
        if self._number is None:
            return bool(torch._C._has_storage(data))  # noqa: SLF001
        return data.data_ptr() != expected.data_ptr() or not torch.equal(self._number, self._bytes)

    def repair(self) -> None:
        """Undo a change that :meth:`is_changed` has found."""
        if self._number is not None:
            self._number.copy_(self._bytes)
        self.install()
