"""States to save: the shapes of real ones, filled with random bytes so that nothing compresses."""

from __future__ import annotations

from collections.abc import Callable

import torch

State = dict[str, torch.Tensor]


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    words = torch.randint(-(2**62), 2**62, (nbytes // 8 + 1,), generator=generator)
    return words.view(torch.uint8)[:nbytes].clone().view(dtype).view(shape)


def bf16_300() -> State:
    """Return about 300 tensors of bf16, 1.5 GB: the weights of a model of 0.76 billion parameters."""
    generator = torch.Generator().manual_seed(1)
    state: State = {}
    for layer in range(42):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("q_proj", (1152, 1152)),
            ("k_proj", (1152, 1152)),
            ("v_proj", (1152, 1152)),
            ("o_proj", (1152, 1152)),
            ("gate_up", (6912, 1152)),
            ("down", (1152, 3456)),
            ("norm", (1152,)),
        ):
            state[prefix + name] = _random(shape, torch.bfloat16, generator)
    state["lm_head"] = _random((32_000, 1152), torch.bfloat16, generator)
    return state


def adamw() -> State:
    """Return 12 of GPT-2 large's 36 layers with AdamW state in fp32, flat: 3.6 GB."""
    generator = torch.Generator().manual_seed(2)
    state: State = {}
    for layer in range(12):
        for name, shape in (
            ("attn", (3840, 1280)),
            ("proj", (1280, 1280)),
            ("fc", (5120, 1280)),
            ("out", (1280, 5120)),
        ):
            for part in ("param", "exp_avg", "exp_avg_sq"):
                state[f"h.{layer}.{name}.{part}"] = _random(shape, torch.float32, generator)
    for part in ("param", "exp_avg", "exp_avg_sq"):
        state[f"wte.{part}"] = _random((50_257, 1280), torch.float32, generator)
        state[f"wpe.{part}"] = _random((1024, 1280), torch.float32, generator)
    return state


def small_10k() -> State:
    """Return 10,000 tensors of 4 to 128 KiB: 680 MB."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1024, 32_768, (10_000,), generator=generator).tolist()
    return {f"adapter.{index}.lora": _random((size,), torch.float32, generator) for index, size in enumerate(sizes)}


def one_2g() -> State:
    """Return one tensor of 2 GiB."""
    return {"weight": _random((1 << 15, 1 << 15), torch.bfloat16, torch.Generator().manual_seed(4))}


STATES: dict[str, Callable[[], State]] = {
    "bf16-300": bf16_300,
    "adamw": adamw,
    "small-10k": small_10k,
    "one-2g": one_2g,
}
