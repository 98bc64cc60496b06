"""Who makes the steps. Each has tensors of its own, all with the same numbers in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = Callable[[], None]
# Read: weights, gradient, two moments. Written: weights and moments.
_F32_BYTES = 28
# A gradient and a copy of the weights of two bytes each, beside fp32 weights and moments.
_BF16_BYTES = 24 + 2 + 2
# The gradient is read once more, for its norm.
_CLIP_BYTES = 32
_MAX_NORM = 0.5
_LR = 1e-3


class NotOffered(Exception):
    """A contestant that cannot take part, and why."""


@dataclass(frozen=True)
class Contestant:
    """A name, and what makes its step for so many elements and threads."""

    name: str
    make: Callable[[int, int], Step]


@dataclass(frozen=True)
class Row:
    """Work that several do, and the bytes of memory that it has to touch for each element."""

    name: str
    element_bytes: float
    line: list[Contestant]


def _numbers(elements: int, seed: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def _ours(kind: str, root: str = "exact") -> Callable[[int, int], Step]:
    def make(elements: int, threads: int) -> Step:
        from deepnvme._deepnvme import Kernel  # noqa: PLC0415

        kernel = Kernel(threads=threads, root=root)
        weights, grad = _numbers(elements, 1), _numbers(elements, 2)
        moments: list[object] = [torch.zeros(elements) for _ in range(2)]
        out = None
        if kind == "bf16":
            grad, out = grad.bfloat16(), torch.zeros(elements, dtype=torch.bfloat16)
        if kind == "q8":
            codes = [torch.zeros(elements, dtype=torch.uint8) for _ in range(2)]
            moments = [(code, torch.zeros(-(-elements // 128))) for code in codes]
        if kind == "bf16-moments":
            moments = [torch.zeros(elements, dtype=torch.bfloat16) for _ in range(2)]
        step = 0

        def run() -> None:
            nonlocal step
            step += 1
            clip = 1.0
            if kind == "clip":
                clip = min(1.0, _MAX_NORM / (kernel.measure([grad])[0] ** 0.5 + 1e-6))
            kernel.step("adamw", {"lr": _LR}, [(weights, grad, moments, out, 0)], step=step, clip=clip)

        return run

    return make


def _torch(kind: str, **options: bool) -> Callable[[int, int], Step]:
    def make(elements: int, threads: int) -> Step:
        torch.set_num_threads(threads)
        weights, grad = torch.nn.Parameter(_numbers(elements, 1)), _numbers(elements, 2)
        optimizer = torch.optim.AdamW([weights], lr=_LR, **options)
        short = grad.bfloat16()
        out = torch.zeros(elements, dtype=torch.bfloat16)
        weights.grad = grad

        def run() -> None:
            if kind == "bf16":
                grad.copy_(short)
            if kind == "clip":
                # It is scaled in place, so that later rounds find it at the bound; that costs the same.
                torch.nn.utils.clip_grad_norm_([weights], _MAX_NORM)
            optimizer.step()
            if kind == "bf16":
                with torch.no_grad():
                    out.copy_(weights)

        return run

    return make


def _deepspeed(elements: int, threads: int) -> Step:
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder  # noqa: PLC0415

        op = CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # a compiler that is missing, a header, a version
        raise NotOffered(f"cpu_adam cannot be built here: {error}") from error
    torch.set_num_threads(threads)
    weights, grad = _numbers(elements, 1), _numbers(elements, 2)
    moments = [torch.zeros(elements) for _ in range(2)]
    # Decoupled weight decay; no word about itself.
    op.create_adam(0, _LR, 0.9, 0.999, 1e-8, 1e-2, True, False)  # noqa: FBT003
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        op.adam_update(0, step, _LR, 0.9, 0.999, 1e-8, 1e-2, True, weights, grad, *moments)  # noqa: FBT003

    return run


OURS = "deepnvme"


def rows() -> list[Row]:
    """All rows; whoever is named like :data:`OURS` is what ratios are of."""
    return [
        Row(
            "fp32",
            _F32_BYTES,
            [
                Contestant(OURS, _ours("fp32")),
                Contestant("deepnvme, torch's roots on AMD", _ours("fp32", "two-step")),
                Contestant("torch, fused", _torch("fp32", fused=True)),
                Contestant("torch, foreach", _torch("fp32", foreach=True)),
                Contestant("torch, as it comes", _torch("fp32")),
                Contestant("DeepSpeed cpu_adam", _deepspeed),
            ],
        ),
        Row(
            "bf16 gradient and copy",
            _BF16_BYTES,
            [
                Contestant(OURS, _ours("bf16")),
                Contestant("torch, fused, with casts", _torch("bf16", fused=True)),
            ],
        ),
        Row(
            "norm, clip and step",
            _CLIP_BYTES,
            [Contestant(OURS, _ours("clip")), Contestant("torch, fused", _torch("clip", fused=True))],
        ),
        Row("bf16 moments", 20, [Contestant(OURS, _ours("bf16-moments"))]),
        Row("8-bit moments", 16 + 8 / 32, [Contestant(OURS, _ours("q8"))]),
    ]
