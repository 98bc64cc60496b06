"""Save a state dict durably, and load it cold: ``torch.save`` and ``torch.load`` beside ``deepnvme``."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

import deepnvme
from deepnvme._demo.comparison import Comparison, WrongResultError, drop
from deepnvme._demo.weights import State, total_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = 3


def compare(state: State, folder: Path, step: Callable[[str], None]) -> tuple[list[Comparison], State]:
    """Alternate both tools. Returns the rates, and the last state that deepnvme loaded.

    Raises:
        WrongResultError: a loaded tensor differs from the saved one.
    """
    size = total_bytes(state) / 1e9
    saved = Comparison("save, durable", "GB/s", "torch.save", f"{size:.2f} GB in {len(state)} tensors")
    loaded = Comparison("load, cold", "GB/s", "torch.load", "")
    path = folder / "state.pt"
    back: State = {}
    tools = [_Tool("torch", torch_save, torch_load), _Tool("deepnvme", deepnvme.save, deepnvme.load)]
    for number in range(ROUNDS):
        for name, save, load in tools if number % 2 == 0 else reversed(tools):
            step(f"{name}: save and load, round {number + 1} of {ROUNDS}")
            back = {}
            began = time.perf_counter()
            save(state, path)
            saved_s = time.perf_counter() - began
            if not drop(path):
                loaded.note = "part of the file was in the page cache"
            began = time.perf_counter()
            back = load(path)
            loaded_s = time.perf_counter() - began
            compare_bits(state, back, name)
            path.unlink()
            (saved.theirs if name == "torch" else saved.ours).append(size / saved_s)
            (loaded.theirs if name == "torch" else loaded.ours).append(size / loaded_s)
    return [saved, loaded], back


class _Tool(NamedTuple):
    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path], State]


def torch_save(state: State, path: Path) -> None:
    """Save as most programs do, and wait for the device, as ``deepnvme.save`` does."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path) -> State:
    """Load as most programs do."""
    state: State = torch.load(path, weights_only=True)
    return state


def compare_bits(state: State, back: State, tool: str) -> None:
    """Compare names, dtypes, shapes and bits.

    Raises:
        WrongResultError: something differs. The message names the tensor.
    """
    if state.keys() != back.keys():
        raise WrongResultError(f"{tool} returned other names: {sorted(state.keys() ^ back.keys())[:5]}")
    for name, tensor in state.items():
        other = back[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise WrongResultError(f"{tool} returned {name} as {other.dtype} {tuple(other.shape)}")
        # As integers: random floats include NaN, which equals nothing.
        words = torch.uint8 if tensor.nbytes % 8 else torch.int64
        if not torch.equal(tensor.reshape(-1).view(words), other.reshape(-1).view(words)):
            raise WrongResultError(f"{tool} returned other bits in {name}")
