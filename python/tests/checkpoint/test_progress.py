"""Progress functions get the bytes done and the total. If one raises, its save or load stops and leaves no file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import deepnvme

from .states import assert_same

if TYPE_CHECKING:
    from pathlib import Path


class EnoughError(Exception):
    pass


def stop(_done: int, _total: int) -> None:
    raise EnoughError


@pytest.fixture(params=["pt", "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"x.{request.param}"


def test_progress_of_a_save_and_a_load(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    size = deepnvme.save({"a": torch.randn(50, 60)}, path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size, size)
    seen.clear()
    deepnvme.load(path, progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1] > 0


def test_a_progress_function_may_stop_the_save(path: Path) -> None:
    with pytest.raises(EnoughError):
        deepnvme.save({"a": torch.zeros(200 << 20, dtype=torch.uint8)}, path, progress=stop)
    assert list(path.parent.iterdir()) == []


def test_a_progress_function_may_stop_the_load(path: Path) -> None:
    state = {"a": torch.randn(4 << 20)}
    deepnvme.save(state, path)
    with pytest.raises(EnoughError):
        deepnvme.load(path, progress=stop)
    assert_same(deepnvme.load(path), state)
