"""Where torch has no GPU, a call that asks for one says what is missing, and how to go on without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.errors import DeviceError, InvalidArgumentError
from deepnvme.integrations._safetensors import TensorFile
from deepnvme.integrations._torch_load import load_as_torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")


@pytest.fixture(params=["state.pt", "state.safetensors"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    found: Path = tmp_path / request.param
    deepnvme.save({"a": torch.ones(3)}, found)
    return found


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_load(path: Path, device: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "device": lambda: deepnvme.load(path, device=device),
        "device ": lambda: deepnvme.load(path, device=device, lazy=True),
        "map_location": lambda: deepnvme.load(path, map_location=device),
        "map_location ": lambda: deepnvme.load(path, map_location={"cpu": str(device)}),
        "device  ": lambda: load_as_torch(path, device),
        "map_location  ": lambda: load_as_torch(path, {"cpu": str(device)}),
    }
    for name, call in calls.items():
        with pytest.raises(DeviceError, match=f"^{name.strip()} is '{device}', and .*; pass {name.strip()}='cpu', or"):
            call()
    assert torch.equal(deepnvme.load(path, map_location={"cuda:0": str(device)})["a"], torch.ones(3)), "not needed"


def test_other_devices(path: Path) -> None:
    with pytest.raises(DeviceError, match=r"'xpu', which torch cannot use here.*; pass 'cpu'"):
        deepnvme.load(path, device="xpu")
    with pytest.raises(InvalidArgumentError, match=r"device is 'nonsense', and is no device.*; pass 'cpu'"):
        deepnvme.load(path, device="nonsense")
    assert deepnvme.load(path, device="meta")["a"].is_meta


def test_safe_open(tmp_path: Path) -> None:
    deepnvme.save({"a": torch.ones(3)}, tmp_path / "state.safetensors")
    with pytest.raises(DeviceError, match="device is 'cuda'"):
        TensorFile(tmp_path / "state.safetensors", device="cuda")


def test_a_torch_without_cuda(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="built without CUDA; pass device='cpu', or install a torch that is built"):
        deepnvme.load(path, device="cuda")


def test_streams(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    deepnvme.save(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(DeviceError, match=r"device is 'cuda', and .*; pass device='cpu', or"):
        deepnvme.stream(model, weights=tmp_path / "model.safetensors", memory="1MB", device="cuda")


def test_commands(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = ["--model", str(tmp_path), "--memory", "1MB", "--prompt", "x", "--device", "cuda"]
    call = [sys.executable, "-m", "deepnvme", "generate", *options]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert done.stderr.startswith("deepnvme: --device is 'cuda', and "), done.stderr
    assert "; pass --device='cpu', or " in done.stderr
