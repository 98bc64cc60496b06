"""Fixtures for the tests of swapped tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import deepnvme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def swapper(tmp_path: Path) -> Iterator[Callable[..., deepnvme.Swapper]]:
    """Create a swapper in the test's folder, closed after the test."""
    made: list[deepnvme.Swapper] = []

    def call(memory: int | str = 16 * 4096, **options: Any) -> deepnvme.Swapper:
        made.append(deepnvme.Swapper(options.pop("folder", tmp_path), memory=memory, **options))
        return made[-1]

    yield call
    for one in made:
        one.close()
