"""Checkpoints of tensors on GPUs: saved and loaded without a whole copy in CPU memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme._checkpoint import load_memory
from deepnvme._utils import devices

from .test_transfer import bits, values

SHAPES = {"a": (300, 1000), "b": (5,), "empty": (0, 3), "scalar": (), "large": (3 << 20,), "c": (70_001,)}


def state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: values(shape, dtype, seed) for seed, (name, shape) in enumerate(SHAPES.items())}


def test_safetensors_from_a_gpu(gpu: Any, tmp_path: Path) -> None:
    host = state()
    on_gpu = {name: gpu.tensor(tensor, number % 2) for number, (name, tensor) in enumerate(host.items())}
    on_gpu["transposed"], host["transposed"] = on_gpu["a"].T, host["a"].T
    path = tmp_path / "model.safetensors"
    deepnvme.save(on_gpu, path)
    loaded = deepnvme.load(path, verify="full")
    assert set(loaded) == set(host)
    for name, tensor in host.items():
        assert bits(loaded[name]) == bits(tensor), name


def test_a_save_waits_for_a_kernel_that_writes_the_tensor(gpu: Any, tmp_path: Path) -> None:
    new = values((500_000,), torch.float32, 2)
    tensor, source = gpu.tensor(values((500_000,), torch.float32, 1)), gpu.tensor(new)
    gpu.late(tensor, source, 60)
    deepnvme.save({"a": tensor}, tmp_path / "a.safetensors")
    assert bits(deepnvme.load(tmp_path / "a.safetensors")["a"]) == bits(new)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_into_tensors_on_a_gpu(gpu: Any, tmp_path: Path, name: str, verify: Any) -> None:
    host = state(torch.bfloat16)
    deepnvme.save(host, tmp_path / name)
    into = {key: gpu.tensor(torch.zeros_like(tensor)) for key, tensor in host.items()}
    assert deepnvme.load(tmp_path / name, into=into, verify=verify) is into
    for key, tensor in host.items():
        assert bits(gpu.to_host(into[key])) == bits(tensor), key


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
def test_safetensors_to_a_gpu(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any) -> None:
    host = state()
    path = tmp_path / "model.safetensors"
    deepnvme.save(host, path)
    if not gpu.is_real:
        make = lambda nbytes, device: gpu.tensor(torch.zeros(nbytes, dtype=torch.uint8), device.index)  # noqa: E731
        monkeypatch.setattr(load_memory, "allocate_on_gpu", make)
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _: tensor)
        # torch itself does not see the simulated GPU.
        monkeypatch.setattr(devices, "_check_cuda", lambda *_: None)
    loaded = deepnvme.load(path, device="cuda:0", verify=verify)
    for name, tensor in host.items():
        assert loaded[name].device.type == "cuda", "also of those without bytes"
        assert loaded[name].shape == tensor.shape
        if tensor.numel():
            assert bits(gpu.to_host(loaded[name])) == bits(tensor), name


def test_damage_is_found_on_a_gpu(gpu: Any, tmp_path: Path) -> None:
    host = state()
    path = tmp_path / "model.safetensors"
    deepnvme.save(host, path)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    into = {key: gpu.tensor(torch.zeros_like(tensor)) for key, tensor in host.items()}
    with pytest.raises(deepnvme.errors.ChecksumError):
        deepnvme.load(path, into=into, verify="full")
