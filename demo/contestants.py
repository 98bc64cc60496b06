"""The ways to save and load a state dict that are compared.

All are held to the same: a save has reached the device when it returns, a load gives back new tensors by name. The
two that write tensors themselves use the safetensors layout, so any safetensors reader opens their files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

import deepnvme
import layout

State = dict[str, torch.Tensor]


class Contestant(Protocol):
    """One way to do it."""

    name: str

    def save(self, state: State, path: Path) -> None:
        """Write all tensors into a new file; return when they have reached the device."""

    def load(self, path: Path) -> State:
        """Read all tensors into new memory."""


class TorchFiles:
    """What people use today."""

    name = "torch.save / torch.load"

    def save(self, state: State, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: Path) -> State:
        state: State = torch.load(path, weights_only=True)
        return state


class PlainPython:
    """`write` and `readinto` of the standard library, without a buffer in between."""

    name = "Python write / readinto"

    def save(self, state: State, path: Path) -> None:
        header, entries = layout.plan(state)
        with path.open("wb", buffering=0) as file:
            write_all(file.fileno(), memoryview(header))
            for entry in entries:
                write_all(file.fileno(), entry.bytes_of(state[entry.name]))
            os.fsync(file.fileno())

    def load(self, path: Path) -> State:
        with path.open("rb", buffering=0) as file:
            entries = layout.parse(file.read)
            state = {entry.name: entry.empty() for entry in entries}
            for entry in entries:
                read_all(file.fileno(), entry.bytes_of(state[entry.name]), entry.offset)
        return state


class TorchThroughDeepnvme:
    """The same torch calls on a file object of ours."""

    name = "torch on deepnvme.open"

    def save(self, state: State, path: Path) -> None:
        with deepnvme.open(path, "wb", durability="full") as file:
            torch.save(state, file)

    def load(self, path: Path) -> State:
        with deepnvme.open(path, "rb") as file:
            state: State = torch.load(file, weights_only=True)
        return state


class Deepnvme:
    """All tensors in one batch."""

    name = "deepnvme write / read"

    def __init__(self) -> None:
        self._engine = deepnvme.Engine()

    def save(self, state: State, path: Path) -> None:
        header, entries = layout.plan(state)
        items: list[tuple[Path, int, torch.Tensor | bytes]] = [(path, 0, header)]
        items += [(path, entry.offset, state[entry.name]) for entry in entries]
        self._engine.write_batch(items, durability="full")

    def load(self, path: Path) -> State:
        with path.open("rb", buffering=0) as file:
            entries = layout.parse(file.read)
        state = {entry.name: entry.empty() for entry in entries}
        self._engine.read_batch([(path, entry.offset, state[entry.name]) for entry in entries])
        return state


def contestants() -> list[Contestant]:
    """The field; the first is what the others are compared with, the last is ours."""
    return [TorchFiles(), PlainPython(), TorchThroughDeepnvme(), Deepnvme()]


def write_all(fd: int, data: memoryview) -> None:
    """One call writes 2 GiB at most."""
    while data:
        data = data[os.write(fd, data) :]


def read_all(fd: int, data: memoryview, offset: int) -> None:
    """One call reads 2 GiB at most."""
    while data:
        count = os.preadv(fd, [data], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}, {len(data)} bytes early")
        data, offset = data[count:], offset + count
