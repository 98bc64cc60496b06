"""All readers refuse a model file with a modified header: names and types are covered by checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme._deepnvme import _run_command
from deepnvme.errors import ChecksumError
from deepnvme.integrations._safetensors import TensorFile
from deepnvme.integrations.weights import iterate_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def swap_names(path: Path) -> None:
    """Swap the names of two tensors of the same shape. Length and data of the file stay the same."""
    first, second, free = b'"0.weight":', b'"1.weight":', b'"?.weight":'
    content = path.read_bytes()
    assert content.count(first) == content.count(second) == 1
    path.write_bytes(content.replace(first, free).replace(second, first).replace(free, second))


@pytest.mark.parametrize("is_set", [False, True])
def test_swapped_names_are_noticed(tmp_path: Path, is_set: bool, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(1)
    options: dict[str, Any] = {"max_shard_bytes": 40_000} if is_set else {}
    deepnvme.save(blocks().state_dict(), path, **options)
    changed = next(file for file in sorted(tmp_path.glob("*.safetensors")) if b'"1.weight":' in file.read_bytes())
    swap_names(changed)

    def stream() -> None:
        deepnvme.stream(blocks(), weights=tmp_path, memory=100_000)

    readers: list[Callable[[], object]] = [
        stream,
        lambda: list(iterate_weights(tmp_path)),
        lambda: TensorFile(changed),
        lambda: deepnvme.load(path),
    ]
    for read in readers:
        with pytest.raises(ChecksumError, match=changed.name):
            read()
    capfd.readouterr()
    assert _run_command(["pack", str(tmp_path), str(tmp_path / "packed")]) == 1
    assert changed.name in capfd.readouterr().err
    assert not (tmp_path / "packed").exists()
