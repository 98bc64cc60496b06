"""A model in the layout of Hugging Face, and the memory of a server for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

Shapes = dict[str, tuple[int, ...]]

_HIDDEN, _INNER, _KEYS, _VOCABULARY = 2048, 5632, 256, 32_000
INDEX = "model.safetensors.index.json"


def shapes(layers: int) -> Shapes:
    """Return the weights of a model of the Llama kind: 88 MB for each layer, 262 MB for its ends, in bf16."""
    found: Shapes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        found[f"{prefix}input_layernorm.weight"] = (_HIDDEN,)
        found[f"{prefix}mlp.down_proj.weight"] = (_HIDDEN, _INNER)
        found[f"{prefix}mlp.gate_proj.weight"] = (_INNER, _HIDDEN)
        found[f"{prefix}mlp.up_proj.weight"] = (_INNER, _HIDDEN)
        found[f"{prefix}post_attention_layernorm.weight"] = (_HIDDEN,)
        found[f"{prefix}self_attn.k_proj.weight"] = (_KEYS, _HIDDEN)
        found[f"{prefix}self_attn.o_proj.weight"] = (_HIDDEN, _HIDDEN)
        found[f"{prefix}self_attn.q_proj.weight"] = (_HIDDEN, _HIDDEN)
        found[f"{prefix}self_attn.v_proj.weight"] = (_KEYS, _HIDDEN)
    return {**found, "model.norm.weight": (_HIDDEN,), "lm_head.weight": (_VOCABULARY, _HIDDEN)}


def write(folder: Path, layers: int, shard_bytes: int) -> int:
    """Write the model in shards with an index. Returns the bytes of its weights."""
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(6)
    shards = list(_shards(shapes(layers), shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        # Random bytes, which no disk can compress; the exponents are those of weights.
        state = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in shard.items()}
        save_file(state, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(state, name))
        total += sum(tensor.nbytes for tensor in state.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (folder / INDEX).write_text(index_text, encoding="utf-8")
    return total


def _shards(wanted: Shapes, shard_bytes: int) -> Iterator[Shapes]:
    begun: Shapes = {}
    held = 0
    for name, shape in wanted.items():
        nbytes = 2 * torch.Size(shape).numel()
        if begun and held + nbytes > shard_bytes:
            yield begun
            begun, held = {}, 0
        begun[name] = shape
        held += nbytes
    yield begun


def files(folder: Path) -> list[Path]:
    """Return the shards, in order."""
    return sorted(folder.glob("*.safetensors"))


def modules(layers: int) -> dict[str, torch.Tensor]:
    """Return the memory of a model that is built and not filled yet. All its pages exist."""
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes(layers).items()}
