"""``load(into=)`` and ``restore(into=)`` refuse tensors that are copies: filling them would load nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.errors import InvalidArgumentError


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))


def test_an_offloaded_models_state_dict(tmp_path: Path) -> None:
    saved = small_model().state_dict()
    deepnvme.save(saved, tmp_path / "model.safetensors")
    model = small_model()
    offloading = deepnvme.offload_parameters(model, memory="64KB", swap_dir=tmp_path)
    try:
        for into in (model.state_dict(), dict(reversed(model.state_dict().items()))):
            with pytest.raises(InvalidArgumentError, match=r"is a copy.*offloading\.load_state_dict"):
                deepnvme.load(tmp_path / "model.safetensors", into=into)
        with deepnvme.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, {"model": saved, "step": 1})
            with pytest.raises(InvalidArgumentError, match=r"model\.\d\.\w+ of into is a copy"):
                checkpointer.restore(into={"model": model.state_dict(), "step": 0})
        offloading.load_state_dict(deepnvme.load(tmp_path / "model.safetensors"))
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
        # A copy of the copies belongs to the caller.
        mine = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        deepnvme.load(tmp_path / "model.safetensors", into=mine)
    finally:
        offloading.close()
    deepnvme.load(tmp_path / "model.safetensors", into=model.state_dict())


@pytest.mark.parametrize(
    "settings", [{"swap_dir": True, "memory": "1MB"}, {"moments": "bf16"}, {"moments": "8bit"}, {}]
)
def test_an_optimizers_state_dict(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = small_model()
    if "swap_dir" in settings:
        settings = settings | {"swap_dir": tmp_path}
    optimizer = deepnvme.optim.AdamW(model.parameters(), lr=0.1, **settings)

    def step() -> None:
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    step()
    deepnvme.save({"optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    saved = [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]
    step()
    into = {"optimizer": optimizer.state_dict()}
    if settings:
        with pytest.raises(InvalidArgumentError, match=r"optimizer\.state\..* is a copy.*optimizer\.load_state_dict"):
            deepnvme.load(tmp_path / "state.pt", into=into)
        optimizer.load_state_dict(deepnvme.load(tmp_path / "state.pt")["optimizer"])
    else:
        deepnvme.load(tmp_path / "state.pt", into=into)
    loaded = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert all(torch.equal(one, other) for one, other in zip(loaded, saved, strict=True))


def test_a_streamed_models_state_dict(tmp_path: Path) -> None:
    deepnvme.save(small_model().state_dict(), tmp_path / "model.safetensors")
    model = deepnvme.stream(small_model(), weights=tmp_path / "model.safetensors", memory="32KB")
    try:
        with pytest.raises(InvalidArgumentError, match=r"has no memory .*streamed model"):
            deepnvme.load(tmp_path / "model.safetensors", into=model.state_dict())
    finally:
        model.streaming.close()
