"""One layer needs nearly all memory, and the others reuse its slot while it is unloaded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import deepnvme

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, DEPTH, WORDS = 128, 12, 2000
LAYER_BYTES, HEAD_BYTES = 4 * (WIDTH * WIDTH + WIDTH), 4 * WIDTH * WORDS


class SmallLayersLargeHead(nn.Module):
    """Small layers, and a head as large as sixteen of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits: torch.Tensor = self.head(hidden)
        return logits


class StreamedPair:
    """A module in memory and its streamed copy."""

    def __init__(self, folder: Path, memory: int) -> None:
        torch.manual_seed(7)
        module = SmallLayersLargeHead().eval()
        deepnvme.save(module.state_dict(), folder / "weights.safetensors")
        self.inputs = torch.randn(3, WIDTH)
        with torch.inference_mode():
            self.expected = module(self.inputs)
        with torch.device("meta"):
            empty = SmallLayersLargeHead().eval()
        self.model: Any = deepnvme.stream(empty, weights=folder / "weights.safetensors", memory=memory)

    def is_right(self) -> bool:
        with torch.inference_mode():
            return torch.equal(self.model(self.inputs), self.expected)


@pytest.mark.parametrize("over", [0.0, 0.02, 0.05])
def test_small_layers_have_the_large_ones_slot(tmp_path: Path, over: float) -> None:
    memory = int((HEAD_BYTES + 8192) * (1 + over))
    pair = StreamedPair(tmp_path, memory)
    streaming = pair.model.streaming
    *_, large, small = streaming.layer_cache.classes
    assert (large.slots, large.shares_memory, small.shares_memory) == (1, False, True)
    assert small.slots >= 3
    assert streaming.layer_cache.memory_bytes + streaming.compressed_cache_bytes <= memory
    for _ in range(5):
        assert pair.is_right()
    before = streaming.counters()
    assert pair.is_right()
    after = streaming.counters()
    assert after["fetches"] - before["fetches"] == len(streaming.layer_cache.groups), "each once in a step"
    assert after["fetches_ahead"] - before["fetches_ahead"] >= DEPTH - 1, "while another is in use"


def test_converted_weights_share_a_slot_in_turns(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
    torch.manual_seed(8)
    config = transformers.LlamaConfig(vocab_size=9000, tie_word_embeddings=False, **shape)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    inputs = torch.randint(0, 9000, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    # The head, a sixteenth of the memory for rows, and the resident weights.
    model = deepnvme.stream(tmp_path, memory=int(4 * 64 * 9000 * 1.085), dtype="float32")
    assert model.streaming.layer_cache.classes[-1].shares_memory
    assert torch.equal(model.generate(inputs, **options), expected.generate(inputs, **options))
    with torch.inference_mode():
        assert torch.equal(model(inputs).logits, expected(inputs).logits)


def test_no_step_overwrites_another_groups_memory(tmp_path: Path) -> None:
    pair = StreamedPair(tmp_path, HEAD_BYTES + 8192)
    assert pair.model.streaming.layer_cache.classes[-1].shares_memory
    wrong: list[int] = []

    def steps(index: int) -> None:
        wrong.extend(index for _ in range(10) if not pair.is_right())

    threads = [threading.Thread(target=steps, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_with_memory_for_both_each_has_its_own(tmp_path: Path) -> None:
    pair = StreamedPair(tmp_path, HEAD_BYTES + 4 * LAYER_BYTES)
    assert not any(each.shares_memory for each in pair.model.streaming.layer_cache.classes)
    assert pair.is_right()
    assert pair.is_right()
