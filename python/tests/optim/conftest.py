"""Fixtures for the tests of optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from deepnvme._deepnvme import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


@pytest.fixture(scope="package", autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small tensors gain nothing from more threads, and suffer from other load on the machine."""
    with threads(1):
        yield


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    """Create a kernel that takes square roots as this torch does."""
    return Kernel(threads=2, sqrt_mode=torchs_sqrt_mode() or "exact")


def torchs_sqrt_mode() -> str | None:
    """Return the `sqrt_mode` whose square roots equal torch's on this CPU, if there is one."""
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * 100
    for mode in Kernel.sqrt_modes():
        taken = values.clone()
        Kernel(threads=1, sqrt_mode=mode).sqrt_(taken)
        if torch.equal(taken, values.sqrt()):
            return mode
    return None


def is_bitwise(*, needs_root: bool) -> bool:
    """Return whether results must equal torch's bit for bit.

    torch must fuse products and sums as it does with AVX2. If the optimizer takes roots, one of our
    `sqrt_mode`s must round them as torch does.
    """
    fuses = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return fuses and (not needs_root or torchs_sqrt_mode() is not None)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor, *, needs_root: bool) -> None:
    """Compare all bits except those of NaNs. If this torch rounds in another way, allow for that."""
    if is_bitwise(needs_root=needs_root):
        differs = (ours.view(torch.int32) != theirs.view(torch.int32)) & ~(ours.isnan() & theirs.isnan())
        first = differs.nonzero().flatten()[:5]
        assert not differs.any(), f"{differs.sum()} of {ours.numel()} differ: {ours[first]} is not {theirs[first]}"
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
