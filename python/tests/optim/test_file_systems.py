"""File systems created by the tests, which need root: one that shares blocks between files, and one that is full."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from deepnvme import optim
from deepnvme.errors import Error, StepStoppedError

from .nets import MEMORY, assert_same_parameters, train, twins

if TYPE_CHECKING:
    from pathlib import Path

_MIB = 1 << 20


@pytest.fixture
def xfs(file_systems: Any) -> Path:
    folder: Path = file_systems.mount("xfs", 512)
    return folder


@pytest.fixture
def small(file_systems: Any) -> Path:
    folder: Path = file_systems.mount("ext4", 32)
    return folder


def fill_up(folder: Path, left: int) -> Path:
    """Leave about that many bytes free, including those reserved for root."""
    ballast, step = folder / "ballast", 64 << 10
    with ballast.open("wb") as file:
        with suppress(OSError):
            for begin in range(0, 1 << 40, step):
                os.posix_fallocate(file.fileno(), begin, step)
        file.truncate(os.fstat(file.fileno()).st_size - left)
    return ballast


@pytest.mark.parametrize("memory", [MEMORY, 8 * _MIB])
def test_blocks_are_shared_until_they_are_changed(xfs: Path, memory: int) -> None:
    """A checkpoint needs no copy. Later writes to the swap file, which shares its blocks, do not change it."""
    one, other = twins()
    mine = optim.AdamW(one.parameters(), lr=1e-3, swap_dir=xfs, memory=memory)
    train(one, mine, range(3))
    path = xfs / "state"
    how = mine.save_state(path)
    size = path.stat().st_size
    assert how["shared_bytes"] >= 0.9 * size, how
    assert how.get("memory_bytes", 0) == 0
    saved, other_state = path.read_bytes(), {name: tensor.clone() for name, tensor in one.state_dict().items()}
    train(one, mine, range(3, 6))
    assert path.read_bytes() == saved
    his = optim.AdamW(other.parameters(), lr=1e-3, swap_dir=xfs, memory=memory)
    other.load_state_dict(other_state)
    how = his.load_state(path)
    assert how["shared_bytes"] >= 0.9 * size, how
    train(other, his, range(3, 6))
    assert path.read_bytes() == saved
    assert_same_parameters(one, other)


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_a_full_disk_in_the_first_step(small: Path, swap_gradients: bool) -> None:
    one, other = twins()
    mine = optim.AdamW(one.parameters(), lr=1e-3, swap_dir=small, memory=MEMORY, swap_gradients=swap_gradients)
    his = optim.AdamW(other.parameters(), lr=1e-3)
    # Room for the gradients, if they are on disk, and for a part of the state.
    gradients = sum(parameter.nbytes for parameter in one.parameters())
    ballast = fill_up(small, gradients * 2 if swap_gradients else gradients)

    with pytest.raises(StepStoppedError) as caught:
        train(one, mine, range(1))
    assert caught.value.errno == errno.ENOSPC
    assert str(small) in str(caught.value)
    with pytest.raises(StepStoppedError):
        mine.step()
    ballast.unlink()
    mine.step()
    train(other, his, range(1))
    assert_same_parameters(one, other)
    train(one, mine, range(1, 4))
    train(other, his, range(1, 4))
    assert_same_parameters(one, other)


def test_a_disk_too_full_to_save(small: Path) -> None:
    one, _ = twins()
    mine = optim.AdamW(one.parameters(), lr=1e-3, swap_dir=small, memory=MEMORY)
    train(one, mine, range(2))
    path = small / "state"
    mine.save_state(path)
    saved = path.read_bytes()
    train(one, mine, range(2, 3))
    fill_up(small, 64 << 10)
    with pytest.raises(OSError, match="space") as caught:
        mine.save_state(path)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, Error)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == saved
    assert sorted(one.name for one in small.iterdir()) == ["ballast", "lost+found", "state"]
