"""Fixtures for the tests of training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from deepnvme._deepnvme import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with enough room."""
    made = tmp_path / "folder"
    made.mkdir()
    return made


@pytest.fixture(scope="package", autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """The same order of sums here and in child processes. Small tensors gain nothing from more threads."""
    with threads(1):
        yield


def is_bitwise() -> bool:
    """Whether torch rounds here as its AVX2 builds do, and uses a square root that the kernel has."""
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * 100
    for mode in Kernel.sqrt_modes():
        taken = values.clone()
        Kernel(threads=1, sqrt_mode=mode).sqrt_(taken)
        if torch.equal(taken, values.sqrt()):
            return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return False


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, name: str = "") -> None:
    """Compare all bits, or within the effect of other roundings if this torch differs."""
    if is_bitwise():
        assert torch.equal(ours, theirs), f"{name}: {(ours != theirs).sum()} of {ours.numel()} differ"
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
