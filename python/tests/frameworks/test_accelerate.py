"""Models placed by accelerate are refused with a remedy. Models that it has released are streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed: make test-frameworks")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks")

import accelerate
import torch
import transformers

import deepnvme
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 211}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path_factory.mktemp("accelerate") / "llama"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(path)
    return path


def loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    answer: torch.Tensor = model(torch.arange(30).reshape(2, 15)).logits
    return answer


def test_a_device_map(folder: Path, tmp_path: Path) -> None:
    places = {"model": "cpu", "lm_head": "disk"}
    model = loaded(folder, device_map=places, offload_folder=tmp_path / "offload")
    with pytest.raises(UnsupportedError, match="load it without device_map"):
        deepnvme.stream(model, weights=folder, memory="1MB")
    with pytest.raises(UnsupportedError, match="device_map"):
        deepnvme.stream(folder, memory="1MB", device_map=places)
    assert torch.equal(logits(model), logits(loaded(folder))), "what was refused is as it was"


def test_a_device_map_that_moves_nothing(folder: Path) -> None:
    model = loaded(folder, device_map={"": "cpu"})
    expected = logits(model)
    streamed = deepnvme.stream(model, weights=folder, memory="1MB")
    assert torch.equal(logits(streamed), expected)
    streamed.streaming.close()


@pytest.mark.parametrize("place", ["cpu_offload", "disk_offload"])
def test_hooks_of_accelerate_and_none_any_more(folder: Path, tmp_path: Path, place: str) -> None:
    model = loaded(folder)
    expected = logits(model)
    extra = {"offload_dir": str(tmp_path / "offload")} if place == "disk_offload" else {}
    model = getattr(accelerate, place)(model, execution_device=torch.device("cpu"), **extra)
    with pytest.raises(UnsupportedError, match="accelerate"):
        deepnvme.stream(model, weights=folder, memory="1MB")
    accelerate.hooks.remove_hook_from_submodules(model)
    model = loaded(folder)
    streamed = deepnvme.stream(model, weights=folder, memory="1MB")
    assert torch.equal(logits(streamed), expected)
    streamed.streaming.close()


def test_a_prepared_model(folder: Path) -> None:
    """On one CPU, ``Accelerator.prepare`` returns the model itself, which is streamed like any other."""
    prepared = accelerate.Accelerator(cpu=True).prepare(loaded(folder))
    expected = logits(prepared)
    streamed = deepnvme.stream(prepared, weights=folder, memory="1MB")
    assert torch.equal(logits(streamed), expected)
    streamed.streaming.close()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
