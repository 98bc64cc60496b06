"""A file that somebody writes to while it is read never gives a mix of old and new bytes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

import deepnvme
from deepnvme.errors import ChangedFileError
from deepnvme.integrations.weights import iterate_weights

if TYPE_CHECKING:
    from pathlib import Path

# File systems may record times in steps of a timer tick.
TICK_S = 0.05
COUNT = 24


def saved(path: Path) -> dict[str, torch.Tensor]:
    state = {f"w{index:02}": torch.full((256, 1024), float(index)) for index in range(COUNT)}
    save_file(state, path)  # without checksums
    time.sleep(TICK_S)
    return state


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(os.urandom(size - size // 2))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [overwrite, truncate])
def test_iterated_weights(tmp_path: Path, change: object) -> None:
    state = saved(tmp_path / "model.safetensors")
    weights = iterate_weights(tmp_path / "model.safetensors", prefetch_bytes="2MB")
    next(weights)
    assert callable(change)
    change(tmp_path / "model.safetensors")
    with pytest.raises(ChangedFileError, match=r"model\.safetensors: the file changed while it was read") as raised:
        for name, tensor in weights:
            assert torch.equal(tensor, state[name])
    assert raised.value.filename == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("change", [overwrite, truncate])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_lazy_tensors(tmp_path: Path, change: object, kind: str) -> None:
    path = tmp_path / f"model.{kind}"
    if kind == "safetensors":
        saved(path)
    else:
        torch.save({f"w{index:02}": torch.full((256, 1024), float(index)) for index in range(COUNT)}, path)
        time.sleep(TICK_S)
    lazy = deepnvme.load(path, lazy=True)
    assert callable(change)
    change(path)
    with pytest.raises(ChangedFileError):
        [float(lazy[f"w{index:02}"][0, 0]) for index in range(COUNT)]


def test_a_file_that_is_replaced_is_read_in_its_old_state(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state = saved(path)
    lazy, weights = deepnvme.load(path, lazy=True), iterate_weights(path, prefetch_bytes="2MB")
    next(weights)
    deepnvme.save({name: tensor + 100 for name, tensor in state.items()}, path)
    for name, tensor in weights:
        assert torch.equal(tensor, state[name])
    assert torch.equal(lazy["w07"] + 0, state["w07"])
