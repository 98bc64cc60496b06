"""The files of the cases, and turns: functions that do one piece of work once and return its seconds."""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING, Literal

import torch

from common import cache, fio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
# The best of a sweep on two machines: buffers that stay in the CPU's cache.
FIO = fio.FioSetting("libaio", 512 << 10, 8, huge=False)
# 256 MiB of buffers exceed the CPU's cache, so that fio meets the memory bus as tensors do.
FIO_LARGE_BUFFERS = fio.FioSetting("libaio", MIB, 256, huge=False)


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Return a turn. The result of the work is released after the clock has stopped."""

    def turn() -> float:
        began = time.perf_counter()
        made = work()
        took = time.perf_counter() - began
        del made
        return took

    return turn


def cold(path: Path, work: Callable[[], object]) -> Callable[[], float]:
    """Return a turn that reads a file which is not in the page cache."""
    run = timed(work)

    def turn() -> float:
        cache.make_cold(path)
        return run()

    return turn


def fio_turn(
    rw: Literal["read", "write"], path: Path, size: int, setting: fio.FioSetting = FIO
) -> Callable[[], float]:
    """Return a turn of fio, which reads or writes the first bytes of a file."""

    def turn() -> float:
        if rw == "read":
            cache.make_cold(path)
        return fio.transfer(setting, rw, path, size).wall_s

    return turn


def fio_new_file_turn(path: Path, size: int) -> Callable[[], float]:
    """Return a turn of fio that writes a new file, as a save does. The time excludes allocating its blocks."""

    def turn() -> float:
        path.unlink(missing_ok=True)
        return fio.transfer(FIO, "write", path, size).wall_s

    return turn


def small_state(count: int = 10_000) -> dict[str, torch.Tensor]:
    """Return tensors of 4 to 64 KiB."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(1024, 16_384, (count,), generator=generator).tolist()
    return {f"adapter.{i}.lora": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}


def large_state(mib: int, tensor_mib: int = 64) -> dict[str, torch.Tensor]:
    """Return tensors of equal size."""
    generator = torch.Generator().manual_seed(1)
    elements = tensor_mib * MIB // 4
    return {f"layers.{i}.weight": torch.randn(elements, generator=generator) for i in range(mib // tensor_mib)}


def small_page_tensor(size: int) -> torch.Tensor:
    """Return page-aligned memory without huge pages, filled with random numbers."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).normal_()
