"""The cases. Each prepares its files and names its tools, which do the same work on the same folder.

Reads are cold, and writes are on the disk when they return. Each goal compares two tools: the
time of the first, divided by that of the second.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import deepnvme
import torch
from deepnvme._checkpoint.iterate import iterate_weights

from casebench.rows import rows_160, rows_4096, rows_skewed, rows_step
from casebench.turns import (
    FIO_LARGE_BUFFERS,
    MIB,
    cold,
    fio_new_file_turn,
    fio_turn,
    large_state,
    small_page_tensor,
    small_state,
    timed,
)
from common import runai
from common.sync import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    Tools = dict[str, Callable[[], float]]


class Goal(NamedTuple):
    """The first tool takes at most this multiple of the time of the second: 1 / 0.85 for 85% of its speed."""

    ours: str
    theirs: str
    most: float


class Case(NamedTuple):
    """A case, and what it is to reach. ``writes``: its turns wait for an idle disk."""

    prepare: Callable[[Path, int], AbstractContextManager[Tools]]
    goals: tuple[Goal, ...]
    writes: bool = False


def _others(path: Path) -> Tools:
    """Return the loaders of safetensors files that people use; the Run:ai streamer only if it is installed."""
    from safetensors.torch import load_file  # noqa: PLC0415

    def safetensors() -> None:
        # The tensors are a memory map: their bytes are read at the first access.
        for tensor in load_file(path).values():
            tensor.clone()

    made = {"safetensors": cold(path, safetensors)}
    try:
        import runai_model_streamer  # noqa: F401, PLC0415
    except ModuleNotFoundError:
        return made
    return {**made, "runai": cold(path, lambda: runai.load(path, runai.DIRECT))}


def _filled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(tensor) for name, tensor in state.items()}


@contextmanager
def load_small(folder: Path, _mib: int) -> Iterator[Tools]:
    """Load 10,000 tensors of 4 to 64 KiB."""
    path, archive = folder / "small.safetensors", folder / "small.pt"
    state = small_state()
    deepnvme.save(state, path)
    deepnvme.save(state, archive)
    into = _filled(state)

    def lazily() -> None:
        for tensor in deepnvme.load(path, lazy=True).values():
            # An operation such as `tensor + 0` would also time torch's addition.
            tensor.materialize()

    def one_by_one() -> None:
        for _ in iterate_weights(path):
            pass

    yield {
        "into": cold(path, lambda: deepnvme.load(path, into=into)),
        ".pt into": cold(archive, lambda: deepnvme.load(archive, into=into)),
        "new": cold(path, lambda: deepnvme.load(path)),
        ".pt new": cold(archive, lambda: deepnvme.load(archive)),
        "iterate_weights": cold(path, one_by_one),
        "lazy": cold(path, lazily),
        "fio": fio_turn("read", path, path.stat().st_size),
        "torch .pt": cold(archive, lambda: torch.load(archive)),
        **_others(path),
    }


def _loads(path: Path, state: dict[str, torch.Tensor]) -> Tools:
    """Save a state, and return the tools that load it."""
    deepnvme.save(state, path)
    size = path.stat().st_size
    return {
        "into": cold(path, lambda: deepnvme.load(path, into=state)),
        "new": cold(path, lambda: deepnvme.load(path)),
        "fio": fio_turn("read", path, size),
        "fio, 256 MiB of buffers": fio_turn("read", path, size, FIO_LARGE_BUFFERS),
        **_others(path),
    }


@contextmanager
def load_one(folder: Path, mib: int) -> Iterator[Tools]:
    """Load one large tensor."""
    yield _loads(folder / "one.safetensors", large_state(mib, mib))


@contextmanager
def load_large(folder: Path, mib: int) -> Iterator[Tools]:
    """Load many tensors of 64 MiB."""
    yield _loads(folder / "large.safetensors", large_state(mib * 3 // 4))


@contextmanager
def read_memory(folder: Path, mib: int) -> Iterator[Tools]:
    """Read a large file into pinned memory, ordinary memory, and memory without huge pages."""
    path, size = folder / "data", mib * MIB
    pinned = deepnvme.pinned_empty(size // 4, torch.float32).normal_()
    ordinary, scattered = torch.ones(size // 4), small_page_tensor(size)
    deepnvme.write(pinned, path)
    yield {
        "pinned": cold(path, lambda: deepnvme.read(pinned, path)),
        "ordinary": cold(path, lambda: deepnvme.read(ordinary, path)),
        "scattered": cold(path, lambda: deepnvme.read(scattered, path)),
        "fio": fio_turn("read", path, size),
        "fio, 256 MiB of buffers": fio_turn("read", path, size, FIO_LARGE_BUFFERS),
    }


@contextmanager
def write_memory(folder: Path, mib: int) -> Iterator[Tools]:
    """Write a large tensor from pinned memory, ordinary memory, and memory without huge pages."""
    size = mib * MIB
    pinned = deepnvme.pinned_empty(size // 4, torch.float32).normal_()
    ordinary, scattered = pinned.clone(), small_page_tensor(size)
    path, raw = folder / "data", folder / "raw"
    for one in (path, raw):
        deepnvme.write(pinned, one, durability="data")
    yield {
        "pinned": timed(lambda: deepnvme.write(pinned, path, durability="data")),
        "ordinary": timed(lambda: deepnvme.write(ordinary, path, durability="data")),
        "scattered": timed(lambda: deepnvme.write(scattered, path, durability="data")),
        "save": timed(lambda: deepnvme.save({"a": scattered}, folder / "saved.safetensors")),
        "fio": fio_turn("write", raw, size),
        "fio, 256 MiB of buffers": fio_turn("write", raw, size, FIO_LARGE_BUFFERS),
    }


@contextmanager
def save_small(folder: Path, _mib: int) -> Iterator[Tools]:
    """Save 10,000 tensors of 4 to 64 KiB."""
    from safetensors.torch import save_file  # noqa: PLC0415

    state = small_state()
    deepnvme.save(state, folder / "ours.safetensors")
    size = (folder / "ours.safetensors").stat().st_size

    def safetensors() -> None:
        save_file(state, folder / "theirs.safetensors")
        sync(folder / "theirs.safetensors")

    def archive() -> None:
        torch.save(state, folder / "theirs.pt")
        sync(folder / "theirs.pt")

    yield {
        ".safetensors": timed(lambda: deepnvme.save(state, folder / "ours.safetensors")),
        ".pt": timed(lambda: deepnvme.save(state, folder / "ours.pt")),
        "fio": fio_new_file_turn(folder / "new", size),
        "fio over its old file": fio_turn("write", folder / "raw", size),
        "safetensors": timed(safetensors),
        "torch .pt": timed(archive),
    }


CASES = {
    "load small": Case(
        load_small,
        (
            Goal("into", "fio", 1 / 0.85),
            Goal("into", "runai", 1),
            Goal("into", "safetensors", 1),
            Goal(".pt into", "into", 1.1),
            Goal("new", "fio", 1 / 0.8),
            Goal("iterate_weights", "fio", 1 / 0.8),
            Goal("lazy", "fio", 1 / 0.8),
        ),
    ),
    "load one": Case(load_one, (Goal("new", "into", 1 / 0.9), Goal("new", "runai", 1))),
    "load large": Case(
        load_large,
        (Goal("new", "into", 1.15), Goal("into", "fio, 256 MiB of buffers", 1), Goal("new", "runai", 1)),
    ),
    "read memory": Case(read_memory, (Goal("pinned", "ordinary", 1 / 0.95), Goal("ordinary", "pinned", 1 / 0.95))),
    "write memory": Case(write_memory, (Goal("scattered", "save", 1 / 0.95),), writes=True),
    "save small": Case(
        save_small, (Goal(".safetensors", "fio", 1 / 0.9), Goal(".pt", "fio", 1 / 0.9)), writes=True
    ),
    **{
        name: Case(
            prepare,
            (
                Goal("gather", "fio, 4 KiB each", 1 / 0.95),
                Goal("gather", "mmap, MADV_WILLNEED", 1 / 2),
                Goal("gather", "pread, 64 threads", 1 / 1.5),
                Goal("gather", "torch.from_file", 1 / 2),
            ),
        )
        for name, prepare in {"rows of 160 bytes": rows_160, "rows of 4 KiB": rows_4096}.items()
    },
    "rows of a step": Case(rows_step, (Goal("gather, p50", "fio, p50", 1.3), Goal("gather, p99", "fio, p99", 2))),
    "rows, skewed": Case(rows_skewed, (Goal("gather", "LRU of rows", 1), Goal("gather", "LRU of pages", 1))),
}
