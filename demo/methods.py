"""The ways to save and load a state dict that the demo compares.

All meet the same requirements: a save has reached the device when it returns, and a load returns new tensors by name.
The two that write tensors themselves use the safetensors layout, so any safetensors reader opens their files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch

import deepnvme
import layout

State = dict[str, torch.Tensor]


class Method(Protocol):
    """One way to save and load."""

    name: str

    def save(self, state: State, path: Path) -> None:
        """Write all tensors to a new file. Return once they have reached the device."""

    def load(self, path: Path) -> State:
        """Read all tensors into new memory."""


class TorchFiles:
    """The usual way today."""

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
    """Unbuffered `write` and `readinto` of the standard library."""

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
    """The same torch calls with a deepnvme file object."""

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


def all_methods() -> list[Method]:
    """All ways. The first is the reference for the ratios, the last is deepnvme's batch call."""
    return [TorchFiles(), PlainPython(), TorchThroughDeepnvme(), Deepnvme()]


def write_all(fd: int, data: memoryview) -> None:
    """One call writes at most 2 GiB."""
    while data:
        data = data[os.write(fd, data) :]


def read_all(fd: int, data: memoryview, offset: int) -> None:
    """One call reads at most 2 GiB."""
    while data:
        count = os.preadv(fd, [data], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}, {len(data)} bytes early")
        data, offset = data[count:], offset + count
