"""Generate token ids in the way that all benchmarks of models do."""

from __future__ import annotations

from typing import Any

import torch


def generate(model: Any, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:  # noqa: ANN401
    """Generate exactly ``new_tokens`` tokens greedily. Returns the prompts with the generated tokens."""
    length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    generated: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length
    )
    return generated
