"""Small transformers models of many architectures, with random weights."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 211
_PLAIN = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_DECODER = {**_PLAIN, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": VOCABULARY}
_MAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _DECODER),
    "qwen2": ("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", _DECODER),
    "gemma": ("GemmaForCausalLM", _DECODER),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 128},
    ),
    "opt": ("OPTForCausalLM", {**_PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 128}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_PLAIN, "intermediate_size": 96, "max_position_embeddings": 128}),
    "mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 8}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 80}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_DECODER, **_EXPERTS}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "bert": ("BertForMaskedLM", {**_PLAIN, "intermediate_size": 96}),
    "modernbert": ("ModernBertForMaskedLM", {**_PLAIN, "intermediate_size": 96, "global_attn_every_n_layers": 2}),
}
# All relevant weights exceed a page, so that groups, rows and experts are split as in real models.
_WIDE = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2011, "num_hidden_layers": 6}
_MIDSIZE = {**_DECODER, **_WIDE, "head_dim": 64}
_GPT2_WIDE = {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 2011, "n_positions": 128}
_T5_WIDE = {"d_model": 256, "d_kv": 64, "d_ff": 704, "num_layers": 4, "num_heads": 4, "vocab_size": 2011}
_MAKES |= {
    "llama_midsize": ("LlamaForCausalLM", _MIDSIZE),
    "qwen3_midsize": ("Qwen3ForCausalLM", _MIDSIZE),
    "gpt2_midsize": ("GPT2LMHeadModel", _GPT2_WIDE),
    "mixtral_midsize": ("MixtralForCausalLM", {**_MIDSIZE, "num_local_experts": 8}),
    "t5_midsize": ("T5ForConditionalGeneration", _T5_WIDE),
    "bert_midsize": ("BertForMaskedLM", {**_PLAIN, **_WIDE}),
}

# A table of rows for the ids of tokens, or for their n-grams, is larger than all other weights together, or nearly.
_TABLE_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
_GEMMA_TABLE = {
    **_TABLE_SIZES,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 2000,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
_QWEN_TABLE = {
    **_TABLE_SIZES,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "head_dim", "indexer_head_dim"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "num_experts_per_tok", "heads_per_ngram", "indexer_n_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "num_experts", "split_ngram_parts", "indexer_compress_ratio"), 4),
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "indexer_kv_heads": 1,
    "indexer_budget": 64,
    "ngram_vocab_size_base": 9000,
    "ple_layer_ids": [1],
    "ple_embed_dim": 512,
}
_GEMMA3N = {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6, "altup_num_inputs": 2}
_MAKES |= {
    "gemma3n": ("Gemma3nForCausalLM", {**_GEMMA_TABLE, **_GEMMA3N}),
    "gemma4": ("Gemma4ForCausalLM", _GEMMA_TABLE),
    "qwen4": ("Qwen4ExpForCausalLM", _QWEN_TABLE),
}

# With the name of the table.
TABLES = {
    "gemma3n": "model.embed_tokens_per_layer.weight",
    "gemma4": "model.embed_tokens_per_layer.weight",
    "qwen4": "model.layers.0.ple.ple_embedding.ngram_embedding.weight",
}
DECODERS = ["llama", "qwen2", "qwen3", "gemma", "gpt2", "opt", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe"]
MIDSIZE = ["llama_midsize", "qwen3_midsize", "gpt2_midsize", "mixtral_midsize"]
ENCODERS = ["bert", "modernbert", "bert_midsize"]
ENCODERS_AND_DECODERS = ["t5", "t5_midsize"]


def make(name: str) -> Any:
    """Create a model. The same name always gives the same weights."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    class_name, sizes = _MAKES[name]
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        pytest.skip(f"this release of transformers has no {class_name}")
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    # Special tokens within a small vocabulary.
    marks = {"cls_token_id": 1, "sep_token_id": 2} if name == "modernbert" else {}
    config = model_class.config_class(**sizes, **ends, **marks)
    torch.manual_seed(sum(name.encode()))
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start as zeros and norms as ones, which would hide mistakes.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def logits(model: Any) -> torch.Tensor:
    """Return the logits of some tokens."""
    tokens = torch.arange(0, 3000, 173)[None]
    with torch.no_grad():
        made: torch.Tensor = model(tokens).logits
    return made


def make_bfloat16(kind: str, hidden_size: int, intermediate_size: int) -> Any:
    """Create a llama or a mixtral of three layers as it is initialised, with the weights of torch's seed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 3000,
        "max_position_embeddings": 64,
    }
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    return model.bfloat16()


@dataclass
class SmallModels:
    """Folders and models, each created on first use."""

    root: Path
    _folders: dict[tuple[str, str], Path] = field(default_factory=dict)
    _models: dict[tuple[str, str], Any] = field(default_factory=dict)

    def folder(self, name: str, variant: str = "single") -> Path:
        """Return the folder of a model. ``variant`` selects the file layout."""
        key = (name, variant)
        if key not in self._folders:
            folder = self.root / f"{name}-{variant}"
            model = make(name)
            if variant in _SAVED:
                _SAVED[variant](model, folder)
            else:
                model.to(getattr(torch, variant)).save_pretrained(folder)
            self._folders[key] = folder
        return self._folders[key]

    def model(self, name: str, variant: str = "single") -> Any:
        """Load the same model into memory with transformers."""
        key = (name, variant)
        if key not in self._models:
            folder = self.folder(name, variant)
            self._models[key] = type_of(name).from_pretrained(folder, dtype="auto").eval()
        return self._models[key]


def type_of(name: str) -> Any:
    """Return the class of a model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return getattr(transformers, _MAKES[name][0])


def weights_bytes(folder: Path) -> int:
    """Return the bytes of the weights on disk."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in {".safetensors", ".bin"})


def tokens(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    """Return random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def shift_header(path: Path, remainder: int) -> None:
    """Make the data of a safetensors file begin at that remainder of 64, by padding its header with spaces."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(json.loads(content[8 : 8 + length])).encode()
    header += b" " * ((remainder - 8 - len(header)) % 64)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def _single(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def _sharded(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size=sum(each.nbytes for each in model.parameters()) // 4)
    assert len([*folder.glob("*.safetensors")]) > 2


def _shifted(remainder: int) -> Callable[[Any, Path], None]:
    def save(model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        shift_header(folder / "model.safetensors", remainder)

    return save


def _archive(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


_SAVED: dict[str, Callable[[Any, Path], None]] = {
    "single": _single,
    "sharded": _sharded,
    "archive": _archive,
    "at_8": _shifted(8),
    "at_2": _shifted(2),
    "at_1": _shifted(1),
}
