"""Models that start on the meta device, checkpoints that are read on demand, and a disk that fails at the end."""

from __future__ import annotations

import copy
import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme._checkpoint.lazy import LazyTensor
from deepnvme._swap import Swapper

from .test_training import MEMORY, Model, batches, loss_of, train

if TYPE_CHECKING:
    from pathlib import Path


def test_from_meta_to_trained(tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain = Model()
    deepnvme.save(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: Any = Model()
    model.head.weight.requires_grad_(False)
    model.head.weight.mark = "kept"
    before = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    offloading = deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == before
    assert model.head.weight is model.embed.weight, "what is tied stays so"
    assert model.head.weight.mark == "kept"
    assert not model.head.weight.requires_grad
    model.head.weight.requires_grad_(True)
    lazy = deepnvme.load(tmp_path / "model.safetensors", lazy=True)
    offloading.load_state_dict(lazy)
    swapped = [tensor for name, tensor in lazy.items() if "blocks" in name and "weight" in name]
    assert all(isinstance(tensor, LazyTensor) and "read=False" in repr(tensor) for tensor in swapped)
    assert torch.equal(loss_of(model, batches(1)[0]), loss_of(plain, batches(1)[0]))
    offloading.close()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_parameters_that_were_never_in_memory_are_trained(tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain = Model()
    with torch.device("meta"):
        model = Model()
    offloading = deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    offloading.load_state_dict(plain.state_dict())
    one = deepnvme.optim.AdamW(model.parameters(), lr=1e-3, swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    offloading.attach(one)
    other = deepnvme.optim.AdamW(plain.parameters(), lr=1e-3)
    assert train(model, one, 3) == train(plain, other, 3)


def test_without_a_state_they_are_zeros(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=tmp_path)
    with offloading.gathered(model.parameters(), write=True):
        assert not any(parameter.any() for parameter in model.parameters())
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    assert model(torch.randn(2, 300)).isfinite().all()


def test_a_module_that_was_streamed_from_the_meta_device(tmp_path: Path) -> None:
    layers = [nn.Linear(300, 300, bias=False) for _ in range(3)]
    expected = nn.Sequential(*layers)
    deepnvme.save(expected.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: Any = nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(3)])
    model[1].weight.purpose = "a test"
    deepnvme.stream(model, weights=tmp_path / "model.safetensors", memory="1MB").streaming.close()
    offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=tmp_path)
    offloading.load_state_dict(expected.state_dict())
    x = torch.randn(2, 300)
    assert torch.equal(model(x), expected(x))
    offloading.close()
    del model.streaming, model.offloading
    assert model[1].weight.purpose == "a test"
    assert torch.equal(copy.deepcopy(model)(x), expected(x))
    torch.save(model, tmp_path / "whole.pt")


def test_a_close_that_fails_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = Model()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    offloading = deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    real, calls = Swapper.borrow, []

    def borrow(self: Swapper, key: str, *, shared: bool = False) -> Any:
        calls.append(key)
        if len(calls) == 3:
            raise deepnvme.Error(errno.EIO, "read at offset 0: Input/output error", "swap")
        return real(self, key, shared=shared)

    monkeypatch.setattr(Swapper, "borrow", borrow)
    with pytest.raises(deepnvme.Error, match="Input/output"):
        offloading.close()
    offloading.close()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, wanted)


@pytest.mark.parametrize("max_shard_bytes", [None, "100KiB", "1GB"])
def test_saved_without_being_in_memory(tmp_path: Path, max_shard_bytes: Any) -> None:
    torch.manual_seed(4)
    model: Any = Model()
    model.register_buffer("seen", torch.arange(5))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = tmp_path / "saved"
    folder.mkdir()
    offloading = deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    for _ in range(2):
        size = offloading.save(folder / "model.safetensors", max_shard_bytes=max_shard_bytes, progress=False)
    files = sorted(path.name for path in folder.iterdir())
    assert sum((folder / name).stat().st_size for name in files if name.endswith(".safetensors")) == size
    assert ("model.safetensors.index.json" in files) == (max_shard_bytes != "1GB"), files
    loaded = deepnvme.load(folder / files[-1] if max_shard_bytes != "1GB" else folder / "model.safetensors")
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    with torch.device("meta"):
        other = Model()
    other.register_buffer("seen", torch.zeros(5, dtype=torch.int64))
    again = deepnvme.offload_parameters(other, memory=MEMORY, swap_dir=tmp_path)
    again.load_state_dict(loaded)
    assert torch.equal(loss_of(other, batches(1)[0]), loss_of(model, batches(1)[0]))
    assert model.state_dict()["embed.weight"].isfinite().all(), "state dicts are whole still"
    with pytest.raises(ValueError, match="safetensors"):
        offloading.save(folder / "model.pt")


@pytest.mark.parametrize("max_shard_bytes", ["100KiB", "1GB"])
def test_a_saved_path_and_a_folder_of_the_usual_name_load(tmp_path: Path, max_shard_bytes: str) -> None:
    model: Any = Model()
    names = model.state_dict().keys()
    offloading = deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    for name, is_found in (("model.safetensors", True), ("other.safetensors", False)):
        folder = tmp_path / name.removesuffix(".safetensors")
        folder.mkdir()
        offloading.save(folder / name, max_shard_bytes=max_shard_bytes)
        assert deepnvme.load(folder / name, lazy=True).keys() == names
        if is_found:
            assert deepnvme.load(folder, lazy=True).keys() == names
        else:
            with pytest.raises(deepnvme.errors.NotFoundError, match="name a file in it"):
                deepnvme.load(folder, lazy=True)


def test_small_parameters_that_stay_in_memory_have_memory_of_their_own(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 512)) for _ in range(4)])
    offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=tmp_path)
    state = {name: torch.randn(one.shape) for name, one in model.named_parameters()}
    offloading.load_state_dict(state)
    for name, one in model.state_dict().items():
        assert torch.equal(one, state[name]), name
    offloading.close()
