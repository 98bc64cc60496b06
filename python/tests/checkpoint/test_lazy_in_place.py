"""Lazy tensors that are changed in place: their sizes are those of the changed tensor."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme

if TYPE_CHECKING:
    from pathlib import Path

CHANGES = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "transposed": lambda model: model.weight.data.t_(),
    "smaller": lambda model: setattr(model.weight, "data", torch.rand(1)),
    "unsqueezed": lambda model: model.weight.data.unsqueeze_(0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_changed_parameter_is_saved_as_it_is(tmp_path: Path, change: Any, suffix: str) -> None:
    model = torch.nn.Linear(1000, 300, bias=False)
    deepnvme.save(model.state_dict(), tmp_path / "m.pt")
    lazy = torch.nn.Linear(1000, 300, bias=False)
    lazy.load_state_dict(deepnvme.load(tmp_path / "m.pt", lazy=True), assign=True)
    change(lazy)
    weight = lazy.weight.detach()
    assert (weight.shape, weight.dtype) == (lazy.weight.shape, lazy.weight.dtype)
    deepnvme.save(lazy.state_dict(), tmp_path / f"new.{suffix}")
    loaded = deepnvme.load(tmp_path / f"new.{suffix}", verify="full")["weight"]
    assert loaded.dtype == weight.dtype
    assert torch.equal(loaded, weight)


@pytest.mark.parametrize("name", ["t_", "unsqueeze_", "resize_"])
def test_a_changed_tensor_is_written_as_it_is(tmp_path: Path, name: str) -> None:
    tensor = torch.rand(30, 70)
    deepnvme.save({"w": tensor}, tmp_path / "m.pt")
    lazy = deepnvme.load(tmp_path / "m.pt", lazy=True)["w"]
    arguments = {"t_": (), "unsqueeze_": (0,), "resize_": (3, 5)}[name]
    getattr(lazy, name)(*arguments)
    getattr(tensor, name)(*arguments)
    assert lazy.shape == tensor.shape
    assert lazy.stride() == tensor.stride()
    deepnvme.write(lazy, tmp_path / "raw")
    back = torch.empty(tensor.shape)
    deepnvme.read(back, tmp_path / "raw")
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("name", ["p0.stripes.json", "m.safetensors.index.json", "m.bin.index.json", "deepnvme.json"])
def test_a_list_is_not_replaced_by_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(deepnvme.errors.InvalidArgumentError, match="the name of a list of files"):
        deepnvme.save({"w": torch.rand(3)}, tmp_path / name)
    assert not any(tmp_path.iterdir())
    deepnvme.save({"w": torch.rand(3)}, tmp_path / "m.pt")
    command = [sys.executable, "-m", "deepnvme", "convert", str(tmp_path / "m.pt"), str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the name of a list of files" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]
