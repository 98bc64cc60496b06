"""Shapes of public models, computed from their configurations.

Each number has its name in the model's ``config.json`` on Hugging Face, at ``source``. ``parameters``
is the expected total, from the model's index of weights or its paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Shape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """A model, by its shapes. ``shapes`` yields the name and the shape of each parameter."""

    name: str
    source: str
    parameters: int
    shapes: Callable[[], Iterator[Shape]]


def _biased(name: str, *shape: int) -> Iterator[Shape]:
    """Yield the shapes of a weight and its bias."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[-1:]


def gpt2() -> Iterator[Shape]:
    """Yield the shapes of GPT-2, whose embedding is also the head.

    n_embd 768, n_layer 12, n_positions 1024, vocab_size 50257.
    """
    yield "wte", (50_257, 768)
    yield "wpe", (1024, 768)
    for layer in range(12):
        prefix = f"h.{layer}."
        yield from _biased(prefix + "ln_1", 768)
        yield from _biased(prefix + "attn.c_attn", 768, 2304)
        yield from _biased(prefix + "attn.c_proj", 768, 768)
        yield from _biased(prefix + "ln_2", 768)
        yield from _biased(prefix + "mlp.c_fc", 768, 3072)
        yield from _biased(prefix + "mlp.c_proj", 3072, 768)
    yield from _biased("ln_f", 768)


def llama(  # noqa: PLR0913 (the numbers of a configuration)
    *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, experts: int = 0
) -> Callable[[], Iterator[Shape]]:
    """Return a function that yields the shapes of a Llama, or with experts of a Mixtral.

    In ``config.json``: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
    intermediate_size, vocab_size, num_local_experts. The names of the experts' weights are simplified.
    """
    kv = hidden // heads * kv_heads

    def shapes() -> Iterator[Shape]:
        yield "model.embed_tokens.weight", (vocab, hidden)
        for layer in range(layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "self_attn.q_proj.weight", (hidden, hidden)
            yield prefix + "self_attn.k_proj.weight", (kv, hidden)
            yield prefix + "self_attn.v_proj.weight", (kv, hidden)
            yield prefix + "self_attn.o_proj.weight", (hidden, hidden)
            if experts:
                yield prefix + "block_sparse_moe.gate.weight", (experts, hidden)
            for expert in range(experts or 1):
                yield from _mlp(f"{prefix}mlp.{expert}.", hidden, intermediate)
            yield prefix + "input_layernorm.weight", (hidden,)
            yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (vocab, hidden)

    return shapes


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Shape]:
    yield prefix + "gate_proj.weight", (intermediate, hidden)
    yield prefix + "up_proj.weight", (intermediate, hidden)
    yield prefix + "down_proj.weight", (hidden, intermediate)


def deepseek_v3() -> Iterator[Shape]:
    """Yield the shapes of the main model, without the module that predicts a second token.

    hidden_size 7168, num_hidden_layers 61, first_k_dense_replace 3, intermediate_size 18432,
    moe_intermediate_size 2048, n_routed_experts 256, n_shared_experts 1, num_attention_heads 128,
    q_lora_rank 1536, kv_lora_rank 512, qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim 128,
    vocab_size 129280.
    """
    hidden, heads = 7168, 128
    yield "model.embed_tokens.weight", (129_280, hidden)
    for layer in range(61):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_a_proj.weight", (1536, hidden)
        yield prefix + "self_attn.q_a_layernorm.weight", (1536,)
        yield prefix + "self_attn.q_b_proj.weight", (heads * (128 + 64), 1536)
        yield prefix + "self_attn.kv_a_proj_with_mqa.weight", (512 + 64, hidden)
        yield prefix + "self_attn.kv_a_layernorm.weight", (512,)
        yield prefix + "self_attn.kv_b_proj.weight", (heads * (128 + 128), 512)
        yield prefix + "self_attn.o_proj.weight", (hidden, heads * 128)
        if layer < 3:  # noqa: PLR2004 (first_k_dense_replace)
            yield from _mlp(prefix + "mlp.", hidden, 18_432)
        else:
            yield prefix + "mlp.gate.weight", (256, hidden)
            yield prefix + "mlp.gate.e_score_correction_bias", (256,)
            yield from _mlp(prefix + "mlp.shared_experts.", hidden, 2048)
            for expert in range(256):
                yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, 2048)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (129_280, hidden)


MODELS = [
    Model("gpt2", "openai-community/gpt2", 124_439_808, gpt2),
    Model(
        "llama-3-8b",
        "meta-llama/Meta-Llama-3-8B",
        8_030_261_248,
        llama(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14_336, vocab=128_256),
    ),
    Model(
        "llama-3-70b",
        "meta-llama/Meta-Llama-3-70B",
        70_553_706_496,
        llama(hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28_672, vocab=128_256),
    ),
    Model(
        "mixtral-8x7b",
        "mistralai/Mixtral-8x7B-v0.1",
        46_702_792_704,
        llama(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14_336, vocab=32_000, experts=8),
    ),
    # The paper says 671 billion (arXiv:2412.19437, section 4.2).
    Model("deepseek-v3", "deepseek-ai/DeepSeek-V3", 671_026_419_200, deepseek_v3),
]
