"""Weights that are smaller on disk than in memory are cached in their disk form."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme._stream import benchmark

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bf16 weights. Computing in float32 doubles their bytes."""
    torch.manual_seed(20261124)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "vocab_size": 1000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """Return the output of the model in memory."""
    with torch.no_grad():
        return logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def logits(model: Any) -> torch.Tensor:
    output: torch.Tensor = model(torch.arange(0, 1000, 97)[None]).logits
    return output


def open_model(folder: Path, share: float, dtype: torch.dtype = torch.float32) -> Any:
    """Open the model with memory for a fraction of its float32 size."""
    stored = (folder / "model.safetensors").stat().st_size
    return deepnvme.stream(folder, memory=int(2 * stored * share), dtype=dtype)


def layer_bytes(model: Any) -> int:
    """Return the bytes that loading all layers once more reads."""
    before = model.streaming.counters()["bytes_read"]
    benchmark.fetch_all(model.streaming)
    return int(model.streaming.counters()["bytes_read"] - before)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 1.2])
def test_the_limit_holds_for_any_memory(folder: Path, expected: torch.Tensor, share: float) -> None:
    model = open_model(folder, share)
    streaming = model.streaming
    for _ in range(3):
        assert torch.equal(logits(model), expected)
    used = streaming.layer_cache.memory_bytes + streaming.compressed_cache_bytes + streaming.resident_bytes
    assert used <= streaming.memory_bytes
    if share > 1:
        assert streaming.compressed_cache_bytes == 0, "with memory for all, nothing is cached in compressed form"
    streaming.close()


def test_with_memory_for_all_disk_bytes_nothing_is_read_again(folder: Path, expected: torch.Tensor) -> None:
    for share in (0.75, 0.9):
        model = open_model(folder, share)
        assert torch.equal(logits(model), expected)
        logits(model)
        assert layer_bytes(model) == 0
        assert torch.equal(logits(model), expected)
        converted = model.streaming.counters()["converting_s"]
        benchmark.fetch_all(model.streaming)
        assert model.streaming.counters()["converting_s"] > converted, "some groups are still decoded"
        model.streaming.close()


def test_a_cached_byte_saves_a_byte_of_reading(folder: Path) -> None:
    read: dict[float, float] = {}
    # Fractions with the same partition into groups.
    for share in (0.4, 0.45, 0.5):
        model = open_model(folder, share)
        logits(model)
        benchmark.fetch_all(model.streaming)
        # Prefetching for the next round makes a difference.
        read[share] = sum(layer_bytes(model) for _ in range(4)) / 4
        model.streaming.close()
    spared = [read[0.4] - read[0.45], read[0.45] - read[0.5]]
    # Keeping groups in float32 would halve the reads at most.
    more = 0.05 * 2 * (folder / "model.safetensors").stat().st_size
    assert all(0.75 * more < each < 1.25 * more for each in spared), (read, more)


def test_unconverted_weights_are_not_cached(folder: Path) -> None:
    model = open_model(folder, 0.2, torch.bfloat16)
    logits(model)
    assert model.streaming.compressed_cache_bytes == 0
    model.streaming.close()


def test_weights_that_shrink_in_memory_are_not_cached(tmp_path: Path) -> None:
    from small_llama import small_llama

    small_llama(vocab_size=1000).float().save_pretrained(tmp_path)
    model = deepnvme.stream(tmp_path, memory="1MB", dtype=torch.bfloat16)
    logits(model)
    assert model.streaming.compressed_cache_bytes == 0
    model.streaming.close()


def test_packed_weights_stay_packed(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepnvme", "pack", str(folder), str(tmp_path / "packed"), "--dtype", "int8"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    stored = (folder / "model.safetensors").stat().st_size
    model = deepnvme.stream(tmp_path / "packed", memory=int(0.8 * stored))
    first = logits(model)
    logits(model)
    assert layer_bytes(model) == 0
    assert model.streaming.compressed_cache_bytes > 0
    assert torch.equal(logits(model), first)
    model.streaming.close()
    in_full = deepnvme.stream(tmp_path / "packed", memory=2 * stored)
    assert torch.equal(logits(in_full), first)
    in_full.streaming.close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_close_frees_the_cache(folder: Path) -> None:
    def once() -> int:
        model = open_model(folder, 0.5)
        logits(model)
        size = model.streaming.compressed_cache_bytes
        model.streaming.close()
        assert model.streaming.compressed_cache_bytes == 0
        del model
        gc.collect()
        return int(size)

    once()
    before = resident()
    sizes = [once() for _ in range(10)]
    assert resident() - before < 3 * max(sizes) > 0
