"""A Llama with random weights, of a few megabytes."""

from __future__ import annotations

from typing import Any

import transformers


def small_llama(**settings: Any) -> Any:
    """Return the model. `settings` are more of those of `LlamaConfig`."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings))
