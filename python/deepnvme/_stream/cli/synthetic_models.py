"""Generate models with random weights for benchmarks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from deepnvme._checkpoint.save import save

if TYPE_CHECKING:
    from pathlib import Path

_VOCABULARY = 32_000
# Hidden size, feed-forward width, heads and key-value heads of Llama models with 1, 7, 13 and 70 billion parameters.
_SHAPES = ((2048, 5632, 32, 4), (4096, 11008, 32, 32), (5120, 13824, 40, 40), (8192, 28672, 64, 8))
# A shape with fewer layers than this is too large, and a smaller one is used. The smallest shape has at least two
# layers.
_LAYERS_MIN = 8


def smallest_bytes(dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of the smallest model that :func:`make_llama` makes."""
    layer, ends = _layer_and_ends(_SHAPES[0], dtype)
    return ends + 2 * layer


def _layer_and_ends(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a layer, and those of the weights outside of layers."""
    hidden, wide, heads, kv_heads = shape
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads * kv_heads)
    layer = attention + 3 * hidden * wide + 2 * hidden
    return dtype.itemsize * layer, dtype.itemsize * (2 * _VOCABULARY * hidden + hidden)


def make_llama(folder: Path, nbytes: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write a Llama-shaped model of random weights, layer by layer, so that it is never in memory as a whole.

    Args:
        folder: receives ``config.json`` and safetensors files with an index.
        nbytes: approximate bytes of weights.
        dtype: of the weights.

    Returns:
        Bytes of weights.
    """
    import transformers  # noqa: PLC0415

    for shape in reversed(_SHAPES):
        layer, ends = _layer_and_ends(shape, dtype)
        layers = round((nbytes - ends) / layer)
        if layers >= _LAYERS_MIN or shape == _SHAPES[0]:
            break
    hidden, wide, heads, kv_heads = shape
    layers = max(layers, 2)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        dtype=str(dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    empty.config.architectures = ["LlamaForCausalLM"]
    empty.config.save_pretrained(folder)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in empty.state_dict().items():
        block = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        parts.setdefault(block, {})[name] = tensor.shape
    generator = torch.Generator().manual_seed(0)
    weight_map, total = {}, 0
    for number, shapes in enumerate(parts.values(), start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        state = {
            name: torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=generator)
            for name, shape in shapes.items()
        }
        save(state, folder / file)
        weight_map.update(dict.fromkeys(state, file))
        total += sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
