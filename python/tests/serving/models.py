"""Model folders for tests: small, with random numbers, in several shards."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path


# Parts of programs that run in a model server. `str.format` is called on the first, so it has no braces.
LOG_PROBABILITIES = """
    def log_probabilities(outputs):
        found = []
        for output in outputs:
            first = output.outputs[0]
            steps = [sorted((token, one.logprob) for token, one in step.items()) for step in first.logprobs]
            found.append([list(first.token_ids), steps])
        return found
"""
RANKS = """
    def answer_all(rank, world, found):
        everybody = [None] * world
        torch.distributed.all_gather_object(everybody, found)
        if rank == 0:
            answer(everybody)

    def write(rank, name, state):
        if rank == 0:
            save_file(state, name)
        torch.distributed.barrier()
"""


def skip_without(package: str) -> None:
    """Skip a module if a model server is not installed. It is not imported here, which takes seconds."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-serving", allow_module_level=True)


def write_shards(folder: Path, shards: int, *, tensors: int = 7, rows: int = 300, seed: int = 11) -> dict[str, Any]:
    """Write tensors of several dtypes and shapes like Hugging Face. Returns them by name."""
    generator = torch.Generator().manual_seed(seed)
    everything: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        state: dict[str, torch.Tensor] = {}
        for index in range(tensors):
            dtype = (torch.bfloat16, torch.float32, torch.float16, torch.int8)[index % 4]
            size = (rows, 37 + index) if index % 3 else (index + 1,)
            numbers = torch.randint(-100, 100, size, generator=generator)
            state[f"model.layers.{shard}.part{index}.weight"] = numbers.to(dtype)
        state[f"model.layers.{shard}.empty"] = torch.empty(0, 4)
        save_file(state, folder / name, metadata={"format": "pt"})
        everything |= state
        places |= dict.fromkeys(state, name)
    index_file = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return everything


def write_llama(folder: Path, **settings: Any) -> None:
    """Write a Llama whose next tokens depend on all its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **settings)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="2MB")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one word for each token of the Llama, for servers that need text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, 320)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)


def write_mixtral(folder: Path) -> None:
    """Write a mixture of experts with separate weights for each expert."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(6)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).bfloat16().save_pretrained(folder, max_shard_size="100KB")


def write_gemma3n(folder: Path, **settings: Any) -> None:
    """Write a Gemma 3n of text, whose next tokens depend on its per-layer embeddings."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    torch.manual_seed(8)
    sizes = {"hidden_size": 64, "intermediate_size": [96] * 4, "num_hidden_layers": 4, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    layers = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
    kinds = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
        "num_kv_shared_layers": 2,
    }
    sparsity = {"activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = Gemma3nTextConfig(
        **sizes, **heads, **layers, **kinds, **sparsity, **ends, initializer_range=0.3, **settings
    )
    _save_gemma(Gemma3nForCausalLM(config), folder)


def write_gemma4(folder: Path, **settings: Any) -> None:
    """Write a Gemma 4 of text, whose next tokens depend on its per-layer embeddings."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(9)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    layers = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16, "global_head_dim": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = Gemma4TextConfig(**sizes, **heads, **layers, **kinds, **ends, initializer_range=0.3, **settings)
    _save_gemma(Gemma4ForCausalLM(config), folder)


def _save_gemma(model: Any, folder: Path) -> None:
    """Make the per-layer embeddings weigh more than the last token, which would otherwise be repeated."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "post_per_layer_input_norm" in name:
                parameter.fill_(10)
            if name.endswith("embed_tokens.weight"):
                parameter.mul_(0.1)
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare shape, dtype and every bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8).flatten(), right.contiguous().view(torch.uint8).flatten())
