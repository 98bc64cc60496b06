"""Generate in large batches, so that each byte read serves many sequences."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Activations of a prompt that are alive at once, in hidden states of all its positions: the residual stream, its
# normalised copy, queries, keys and values, the attention output, and parts of the feed-forward that are not counted
# separately.
_HIDDEN_STATES = 8
# Characters of a prompt that an error shows.
_SHOWN_MAX = 100
# Maximum batch size: beyond it every machine is limited by its CPU.
BATCH_MAX = 1024


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes that one sequence of a batch needs in addition to the weights."""

    # Keys and values of all layers and positions.
    cache_bytes: int
    # The largest activations of its prompt.
    activation_bytes: int

    @property
    def nbytes(self) -> int:
        """The sum of both."""
        return self.cache_bytes + self.activation_bytes


def sequence_memory(config: Any, dtype: torch.dtype, prompt_tokens: int, new_tokens: int) -> SequenceMemory:
    """Estimate the memory of one sequence from the sizes in a transformers config."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or hidden // heads
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    positions = prompt_tokens + new_tokens
    cache = 2 * layers * kv_heads * head_size * positions * dtype.itemsize
    # transformers computes logits of the last position only, in fp32.
    activations = prompt_tokens * (_HIDDEN_STATES * hidden + 3 * wide) * dtype.itemsize + 4 * text.vocab_size
    return SequenceMemory(cache, activations)


def best_batch(model: Any, prompt_tokens: int, new_tokens: int, memory: int | None = None) -> int:
    """Find the largest batch whose KV cache and activations fit.

    Args:
        model: a model of transformers.
        prompt_tokens: tokens of the longest prompt.
        new_tokens: tokens to generate.
        memory: bytes, in addition to the memory for weights. Default: half of the free memory of the model's device.

    Returns:
        The batch size in sequences, from 1 to ``BATCH_MAX``. It is 1 even if one sequence does not fit.
    """
    if not hasattr(model, "config") or not hasattr(model, "device"):
        msg = (
            f"best_batch reads a configuration of transformers, and this model is a {type(model).__name__}; choose the "
            "batch yourself"
        )
        raise InvalidArgumentError(msg)
    if memory is None:
        memory = _free_bytes(model.device) // 2
    each = sequence_memory(model.config, model.dtype, prompt_tokens, new_tokens)
    return max(1, min(memory // each.nbytes, BATCH_MAX))


def generate_all(
    open_model: Callable[[], Any],
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    batch: int | None = None,
    max_new_tokens: int = 128,
    on_token: Callable[[int], None] | None = None,
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """Generate text for many prompts in large batches, longest prompts first.

    Args:
        open_model: returns the result of :func:`stream`, or raises if it was closed. Called before each batch.
        tokenizer: the model's tokenizer. Its padding side is set to left.
        prompts: a list of str.
        batch: prompts per batch. Default: :func:`best_batch`.
        max_new_tokens: limit for each prompt.
        on_token: called after each step with the number of tokens it made.
        **options: passed to ``model.generate``.

    Yields:
        The index of a prompt and the generated text, batch by batch.
    """
    if isinstance(prompts, str):
        msg = f"prompts is one str, {prompts[:_SHOWN_MAX]!r}; it must be a list of str"
        raise TypeError(msg)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    lengths = [len(ids) for ids in tokenizer(list(prompts))["input_ids"]] if prompts else []
    if 0 in lengths:
        index = lengths.index(0)
        msg = (
            f"prompt {index + 1} of {len(prompts)} is {prompts[index][:_SHOWN_MAX]!r}, which has no tokens for this "
            "model; write text into it, or remove it. If it has text, the tokenizer lacks its files: copy them"
        )
        raise InvalidArgumentError(msg)
    order = sorted(range(len(prompts)), key=lambda index: -lengths[index])
    if batch is None and order:
        batch = best_batch(open_model(), lengths[order[0]], max_new_tokens)
    criteria = [_TokenCounter(on_token)] if on_token is not None else None
    for start in range(0, len(order), batch or 1):
        model = open_model()
        chosen = order[start : start + (batch or 1)]
        inputs = tokenizer([prompts[index] for index in chosen], return_tensors="pt", padding=True).to(model.device)
        ids = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=criteria,
            **options,
        )
        fresh = ids[:, inputs["input_ids"].shape[1] :] if not model.config.is_encoder_decoder else ids
        texts = tokenizer.batch_decode(fresh, skip_special_tokens=True)
        yield from zip(chosen, texts, strict=True)


class _TokenCounter:
    """Reports each step, as a stopping criterion that never stops."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        self._on_token(input_ids.shape[0])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
