"""The `aio_handle` interface: DeepSpeed's own compiled op, and deepnvme's drop-in with the same names.

One file for both, so that both are called in exactly the same way. The interface has no fsync; an `os.fsync`
of the written file is added inside the timing for both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.sync import fsync
from storagebench.tools.base import Group, OneCall, Tool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from common.handle_setting import HandleSetting
    from common.measure import Action

# Each operation on a name keeps a descriptor open until wait().
_RESERVED_DESCRIPTORS = 256


@dataclass
class Chosen:
    """The best setting for each kind of work."""

    read: HandleSetting
    write: HandleSetting
    small: HandleSetting
    in_flight: HandleSetting


class AioHandle(Tool):
    """One way to call `aio_handle`.

    Args:
        name: as printed.
        group: ``DeepSpeed`` or ``deepnvme``.
        module: the module that has `aio_handle`.
        chosen: settings for each kind of work.
        pinned: use the handle's own pinned memory wherever the row has such.
    """

    def __init__(self, name: str, group: Group, module: Any, chosen: Chosen, *, pinned: bool) -> None:  # noqa: ANN401
        super().__init__(name, group)
        self._module = module
        self._chosen = chosen
        self._pinned = pinned
        self._handles: dict[HandleSetting, Any] = {}

    def settings(self) -> str:
        """See the base."""
        chosen = self._chosen
        return f"read: {chosen.read}; write: {chosen.write}; small: {chosen.small}; in flight: {chosen.in_flight}"

    def handle(self, setting: HandleSetting) -> Any:  # noqa: ANN401
        """Return the handle with this setting, made once: making one costs tenths of a second."""
        if setting not in self._handles:
            self._handles[setting] = self._module.aio_handle(
                setting.block_bytes,
                setting.queue_depth,
                setting.single_submit,
                setting.overlap_events,
                setting.parallelism,
            )
        return self._handles[setting]

    def pinned_copy(self, source: torch.Tensor) -> torch.Tensor | None:
        """See the base."""
        if not self._pinned:
            return None
        tensor: torch.Tensor = self.handle(self._chosen.read).new_cpu_locked_tensor(source.numel(), source)
        tensor.copy_(source)
        return tensor

    def free_pinned(self, tensor: torch.Tensor) -> None:
        """See the base."""
        self.handle(self._chosen.read).free_cpu_locked_tensor(tensor)

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return self.write_with(self._chosen.write, source, path)

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return self.read_with(self._chosen.read, target, path)

    def write_with(self, setting: HandleSetting, source: torch.Tensor, path: Path) -> Action:
        """Write with a given setting; the sweep uses this too."""
        handle = self.handle(setting)

        def action() -> None:
            _check(handle.sync_pwrite(source, str(path)), 1)
            fsync(path)

        return action

    def read_with(self, setting: HandleSetting, target: torch.Tensor, path: Path) -> Action:
        """Read with a given setting; the sweep uses this too."""
        handle = self.handle(setting)
        return lambda: _check(handle.sync_pread(target, str(path)), 1)

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: one asynchronous write for each tensor, then wait."""
        handle = self.handle(self._chosen.small)

        def action() -> None:
            _in_turns(handle, handle.async_pwrite, sources, offsets, path)
            fsync(path)

        return action

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: one asynchronous read for each tensor, then wait."""
        return self.reads_with(self._chosen.small, targets, offsets, path)

    def in_flight(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base."""
        return self.reads_with(self._chosen.in_flight, targets, offsets, path)

    def reads_with(
        self,
        setting: HandleSetting,
        targets: Sequence[torch.Tensor],
        offsets: Sequence[int],
        path: Path,
    ) -> Action:
        """Start one asynchronous read for each tensor, then wait; the sweep uses this too."""
        handle = self.handle(setting)
        return lambda: _in_turns(handle, handle.async_pread, targets, offsets, path)

    def call(self, target: torch.Tensor, path: Path) -> OneCall:
        """See the base."""
        return _SyncRead(self.handle(self._chosen.small), target, path)

    def close(self) -> None:
        """See the base."""
        self._handles.clear()


class _SyncRead(OneCall):
    def __init__(self, handle: Any, target: torch.Tensor, path: Path) -> None:  # noqa: ANN401
        self._handle, self._target, self._path = handle, target, str(path)

    def read_at(self, offset: int) -> None:
        _check(self._handle.sync_pread(self._target, self._path, offset), 1)


def _in_turns(
    handle: Any,  # noqa: ANN401
    start: Any,  # noqa: ANN401
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    path: Path,
) -> None:
    """Start everything and wait, in as few turns as the limit of open files allows."""
    name = str(path)
    turn = max(1, os.sysconf("SC_OPEN_MAX") - _RESERVED_DESCRIPTORS)
    for first in range(0, len(tensors), turn):
        group = tensors[first : first + turn]
        for tensor, offset in zip(group, offsets[first : first + turn], strict=True):
            _check(start(tensor, name, offset), 0)
        _check(handle.wait(), len(group))


def _check(returned: int, wanted: int) -> None:
    if returned != wanted:
        raise RuntimeError(f"aio_handle returned {returned} instead of {wanted}")
