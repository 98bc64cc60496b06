"""Copies and pickles of an offloaded model are refused; a closed model is copied."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme

from .test_training import MEMORY, Model, batches, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "deepnvme": lambda model: deepnvme.save(model, "never.pt"),
}


def made(tmp_path: Path) -> Any:
    torch.manual_seed(1)
    model = Model()
    deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    return model


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    model = made(tmp_path)
    with pytest.raises((TypeError, RuntimeError), match=r"on disk.*model\.offloading\.close\(\)"):
        COPIES[name](model)
    # A part of it, whose parameters come before hooks.
    with pytest.raises((TypeError, RuntimeError), match=r"on disk.*model\.offloading\.close\(\)"):
        COPIES[name](model.blocks)
    in_memory = model.offloading.gathered(model.blocks[0].parameters())
    with in_memory, pytest.raises((TypeError, RuntimeError), match=r"on disk.*model\.offloading\.close\(\)"):
        COPIES[name](model)
    loss_of(model, batches(1)[0])


def test_a_closed_model_is_copied(tmp_path: Path) -> None:
    model = made(tmp_path)
    model.offloading.close()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(loss_of(other, batches(1)[0]), loss_of(model, batches(1)[0]))
        assert other.offloading is None
        deepnvme.offload_parameters(other, memory=MEMORY, swap_dir=tmp_path).close()
