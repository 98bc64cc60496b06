"""The cases: two tools each, deepnvme and a baseline, which do the same work on the same folder.

A case is a context: it prepares its files and gives two functions, each of which does the work once and returns its
seconds. Reads are cold, and writes are on the disk when they return.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import deepnvme
import torch

from common import cache, fio
from common.sync import sync
from swapbench.fio_mixed import MixedJob, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

_READ = fio.FioSetting("libaio", 1 << 20, 32, huge=False)
_MIXED = MixedJob(fio.FioSetting("io_uring", 1 << 20, 16, huge=False))
_BATCH = fio.FioSetting("io_uring", 4096, 128, huge=False)
_PIECES = 10_000
_IN_MEMORY = 2_000  # items, and small parameters
_STATE_ELEMENTS = 16 << 20


class Tools(NamedTuple):
    """Both do the work once, and return their seconds."""

    ours: Callable[[], float]
    theirs: Callable[[], float]


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cold(path: Path, work: Callable[[], object]) -> Callable[[], float]:
    def turn() -> float:
        cache.make_cold(path)
        return seconds(work)

    return turn


def _state(count: int, elements: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(elements, generator=generator) for i in range(count)}


def _small(seed: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1024, 16_384, (_PIECES,), generator=generator).tolist()
    return {f"adapter.{i}.lora": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}


def _fio_read(path: Path) -> Callable[[], float]:
    def turn() -> float:
        cache.make_cold(path)
        return fio.transfer(_READ, "read", path, path.stat().st_size).wall_s

    return turn


@contextmanager
def load_into(folder: Path) -> Iterator[Tools]:
    """Load large tensors into existing ones; fio reads the same file."""
    path = folder / "large.safetensors"
    deepnvme.save(state := _state(32, 4 << 20), path)
    yield Tools(_cold(path, lambda: deepnvme.load(path, into=state)), _fio_read(path))


@contextmanager
def load_new(folder: Path) -> Iterator[Tools]:
    """Load large tensors into new memory; fio reads the same file."""
    path = folder / "large.safetensors"
    deepnvme.save(_state(32, 4 << 20), path)
    yield Tools(_cold(path, lambda: deepnvme.load(path)), _fio_read(path))


@contextmanager
def save_large(folder: Path) -> Iterator[Tools]:
    """Save large tensors durably; fio writes as many bytes over a file, and syncs."""
    path, raw = folder / "large.safetensors", folder / "raw"
    state = _state(32, 4 << 20)
    deepnvme.save(state, path)
    size = path.stat().st_size
    yield Tools(
        lambda: seconds(lambda: deepnvme.save(state, path)),
        lambda: fio.transfer(_READ, "write", raw, size).wall_s,
    )


@contextmanager
def load_small(folder: Path) -> Iterator[Tools]:
    """Load 10,000 small tensors into existing ones; safetensors loads the same file."""
    from safetensors.torch import load_file  # noqa: PLC0415

    path = folder / "small.safetensors"
    deepnvme.save(state := _small(), path)
    yield Tools(_cold(path, lambda: deepnvme.load(path, into=state)), _cold(path, lambda: load_file(path)))


@contextmanager
def save_small(folder: Path) -> Iterator[Tools]:
    """Save 10,000 small tensors durably; safetensors saves them and syncs."""
    from safetensors.torch import save_file  # noqa: PLC0415

    state = _small()

    def theirs() -> None:
        save_file(state, folder / "theirs.safetensors")
        sync(folder / "theirs.safetensors")

    yield Tools(lambda: seconds(lambda: deepnvme.save(state, folder / "ours.safetensors")), lambda: seconds(theirs))


@contextmanager
def read_pieces(folder: Path) -> Iterator[Tools]:
    """Read 10,000 scattered pieces of 4 KiB as one batch; fio reads as many at depth 128."""
    path, size = folder / "pieces", 512 << 20
    deepnvme.write(torch.randint(0, 256, (size,), dtype=torch.uint8), path)
    target = torch.empty(_PIECES, 4096, dtype=torch.uint8)
    # Every other page at most: no two can be joined.
    pages = torch.randperm(size // 8192, generator=torch.Generator().manual_seed(3))[:_PIECES].tolist()
    items = [(path, page * 8192, row) for page, row in zip(pages, target, strict=True)]

    def theirs() -> float:
        cache.make_cold(path)
        return fio.random_reads(_BATCH, path, size, _PIECES).wall_s

    yield Tools(_cold(path, lambda: deepnvme.read_batch(items)), theirs)


@contextmanager
def swap_step(folder: Path) -> Iterator[Tools]:
    """Borrow, change and write back each tensor of a state; fio reads and writes as many bytes."""
    state = _state(16, 4 << 20)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    lay_out(folder / "mixed", nbytes)
    (folder / "swap").mkdir(exist_ok=True)
    with deepnvme.Swapper(folder / "swap", memory=nbytes // 4) as swapper:
        for key, tensor in state.items():
            swapper.put(key, tensor)
        swapper.flush()
        swapper.schedule(list(state))

        def step() -> None:
            for key in state:
                with swapper.borrow(key) as tensor:
                    tensor.add_(1)
            swapper.flush()

        yield Tools(lambda: seconds(step), lambda: 2 * nbytes / _MIXED.run(folder / "mixed", 2 * nbytes))


@contextmanager
def borrow(folder: Path) -> Iterator[Tools]:
    """Borrow 2,000 items that are in memory; as many additions of torch to a small tensor."""
    (folder / "swap").mkdir(exist_ok=True)
    with deepnvme.Swapper(folder / "swap", memory="256MB") as swapper:
        keys = [str(index) for index in range(_IN_MEMORY)]
        for key in keys:
            swapper.put(key, torch.randn(1024))
        small = torch.randn(256)

        def borrows() -> None:
            for key in keys:
                with swapper.borrow(key, shared=True):
                    pass

        def additions() -> None:
            for _ in keys:
                small.add_(1)

        yield Tools(lambda: seconds(borrows), lambda: seconds(additions))


def _parameters(count: int, elements: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    made = [torch.nn.Parameter(torch.randn(elements, generator=generator)) for _ in range(count)]
    for param in made:
        param.grad = torch.randn(elements, generator=generator)
    return made


@contextmanager
def optimizer_small(_folder: Path) -> Iterator[Tools]:
    """Step 2,000 small parameters in memory; torch's foreach step does the same."""
    ours = deepnvme.optim.AdamW(_parameters(_IN_MEMORY, 2048))
    theirs = torch.optim.AdamW(_parameters(_IN_MEMORY, 2048), foreach=True)
    yield Tools(lambda: seconds(ours.step), lambda: seconds(theirs.step))


@contextmanager
def optimizer_on_disk(folder: Path) -> Iterator[Tools]:
    """Step with state on disk; fio reads and writes as many bytes."""
    (folder / "swap").mkdir(exist_ok=True)
    params = _parameters(8, _STATE_ELEMENTS // 8)
    state_bytes = 2 * 4 * _STATE_ELEMENTS
    ours = deepnvme.optim.AdamW(params, swap_dir=folder / "swap", memory=state_bytes // 4)
    lay_out(folder / "mixed", state_bytes)
    yield Tools(lambda: seconds(ours.step), lambda: 2 * state_bytes / _MIXED.run(folder / "mixed", 2 * state_bytes))


@contextmanager
def stream(folder: Path) -> Iterator[Tools]:
    """Run a model with a quarter of its memory; fio reads as many bytes."""
    width, depth = 2048, 24
    path = folder / "model.safetensors"
    deepnvme.save(
        {f"{i}.weight": tensor.view(width, width) for i, tensor in enumerate(_state(depth, width**2).values())},
        path,
    )
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth))).eval()
    model = deepnvme.stream(module, weights=path, memory=path.stat().st_size // 4, verify="off")
    row = torch.randn(1, width)
    with model.streaming, torch.no_grad():
        yield Tools(_cold(path, lambda: model(row)), _fio_read(path))


@contextmanager
def first_call(folder: Path) -> Iterator[Tools]:
    """Start Python, import deepnvme and read 1 MiB; Python alone reads it."""
    path = folder / "mebibyte"
    deepnvme.write(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8), path)
    ours = f"import deepnvme; deepnvme.read(bytearray(1 << 20), {str(path)!r})"
    theirs = f"open({str(path)!r}, 'rb').readinto(bytearray(1 << 20))"

    def run(program: str) -> Callable[[], float]:
        return lambda: seconds(lambda: subprocess.run([sys.executable, "-c", program], check=True))

    yield Tools(run(ours), run(theirs))


class Case(NamedTuple):
    """A case, and what it needs."""

    prepare: Callable[[Path], AbstractContextManager[Tools]]
    needs_fio: bool = True
    writes: bool = False


CASES = {
    "load, into existing tensors": Case(load_into),
    "load, into new memory": Case(load_new),
    "save": Case(save_large, writes=True),
    "load, 10,000 small tensors": Case(load_small, needs_fio=False),
    "save, 10,000 small tensors": Case(save_small, needs_fio=False, writes=True),
    "read_batch, 10,000 pieces of 4 KiB": Case(read_pieces),
    "swap, a step": Case(swap_step, writes=True),
    "swap, borrows in memory": Case(borrow, needs_fio=False),
    "AdamW, 2,000 small parameters": Case(optimizer_small, needs_fio=False),
    "AdamW, state on disk": Case(optimizer_on_disk, writes=True),
    "stream, a pass": Case(stream),
    "first call in a process": Case(first_call, needs_fio=False),
}
