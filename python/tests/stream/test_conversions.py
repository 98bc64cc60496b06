"""Weights that are converted on load equal the weights that were cast before saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme._stream.planner import lay_out_group
from deepnvme._stream.weight_origin import ByteRange, Origin, conversions, stored_ranges

from .small_models import logits, make_bfloat16

transformers = pytest.importorskip("transformers")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model on disk. Its experts are assembled from several ranges."""
    torch.manual_seed(20261122)
    path = tmp_path_factory.mktemp(request.param)
    make_bfloat16(request.param, 128, 320).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("memory", ["6MB", "40MB"])
def test_a_cast_model_computes_the_same_as_in_memory(folder: Path, dtype: torch.dtype, memory: str) -> None:
    expected = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    model = deepnvme.stream(folder, memory=memory, dtype=dtype)
    assert model.dtype == dtype
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), expected), "also with resident weights"
    figures = model.streaming.counters()
    assert (figures["converting_s"] > 0) == (dtype != torch.bfloat16)
    model.streaming.close()


def test_budgets_count_bytes_in_memory(folder: Path) -> None:
    short, wide = (deepnvme.stream(folder, memory="40MB", dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert wide.streaming.model_bytes == 2 * short.streaming.model_bytes
    for model in (short, wide):
        model.streaming.close()


def test_other_dtypes_are_not_cast(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100
    )
    state = transformers.LlamaForCausalLM(config).state_dict()
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].double()
    deepnvme.save(state, tmp_path / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(deepnvme.errors.UnsupportedError, match=r"up_proj.*float64 on disk"):
        deepnvme.stream(tmp_path, memory="10MB", dtype=torch.float32)


def test_a_file_that_is_damaged_in_mid_stream_is_an_error_and_nothing_hangs(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    # Two thirds of it, so that every step reads something.
    memory = (folder / "model.safetensors").stat().st_size * 2 * 2 // 3
    model = deepnvme.stream(tmp_path, memory=memory, dtype=torch.float32)
    logits(model)
    with (tmp_path / "model.safetensors").open("r+b") as weights:
        weights.truncate(100_000)
    with pytest.raises(deepnvme.errors.ChangedFileError):
        logits(model)
    model.streaming.close()


def test_converted_weights_follow_page_congruent_ones() -> None:
    plain = Origin((ByteRange(0, 5000, 4000),), torch.float32, (1000,))
    cast = Origin((ByteRange(0, 9000, 1000), ByteRange(1, 70, 1000)), torch.bfloat16, (1000,)).cast(torch.float32)
    layout = lay_out_group([cast, plain, cast], {0: 20_000, 1: 20_000})
    assert layout.reads == ((0, 4096, 8192, 0),)
    assert layout.offsets == (8192, 904, 8192)
    assert [(stored_range[:3], at) for stored_range, at, _ in layout.conversions] == [
        ((0, 9000, 1000), 8192),
        ((1, 70, 1000), 10192),
    ]
    assert layout.nbytes >= 8192 + 4000
    assert stored_ranges(plain) == [(0, 5000, 4000, "float32")]
    assert conversions(cast, 0)[1] == ((1, 70, 1000, "bfloat16"), 2000, "float32")


def test_a_part_of_a_cast_weight_is_cast_too() -> None:
    cast = Origin((ByteRange(0, 100, 800),), torch.bfloat16, (4, 100)).cast(torch.float32)
    assert (cast.nbytes, cast.memory_nbytes, cast.is_raw) == (800, 1600, False)
    assert cast.reshaped((400,)).cast_to == torch.float32
    assert cast.cast(torch.bfloat16).is_raw
