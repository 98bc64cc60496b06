"""The optimizers. All use the same tensors, since the address of a tensor affects speed more than the tool does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from common.not_offered import NotOffered

Step = Callable[[], None]
# Read: weights, gradient, two moments. Written: weights and moments.
_F32_BYTES = 28
# A gradient and a copy of the weights of two bytes each, with fp32 weights and moments.
_BF16_BYTES = 24 + 2 + 2
# The gradient is read once more, for its norm.
_CLIP_BYTES = 32
_MAX_NORM = 0.5
_LR = 1e-3
_BLOCK = 128


class Tensors:
    """The tensors of a round, somewhere in memory. Pages are there before the first step."""

    def __init__(self, weights: torch.Tensor, grad: torch.Tensor) -> None:
        self.weights = torch.nn.Parameter(weights.clone())
        self.grad = grad.clone()
        self.moments = [torch.empty_like(grad).zero_() for _ in range(2)]

    @cached_property
    def short_grad(self) -> torch.Tensor:
        """The gradient as bf16."""
        return self.grad.bfloat16()

    @cached_property
    def copy(self) -> torch.Tensor:
        """The copy of the weights as bf16."""
        return self.weights.detach().bfloat16()

    @cached_property
    def short_moments(self) -> list[torch.Tensor]:
        """The moments as bf16."""
        return [moment.bfloat16() for moment in self.moments]

    @cached_property
    def codes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Moments of 8 bits, and a scale for each block."""
        blocks = -(-len(self.grad) // _BLOCK)
        return [(moment.to(torch.uint8), torch.empty(blocks).zero_()) for moment in self.moments]


@dataclass(frozen=True)
class Tool:
    """A name, and the function that makes its step for given tensors and a number of threads."""

    name: str
    make: Callable[[Tensors, int], Step]


@dataclass(frozen=True)
class Row:
    """Work that several do, and the bytes of memory that it has to touch for each element."""

    name: str
    element_bytes: float
    tools: list[Tool]


def _ours(kind: str, sqrt_mode: str = "exact") -> Callable[[Tensors, int], Step]:
    def make(tensors: Tensors, threads: int) -> Step:
        from deepnvme._deepnvme import Kernel  # noqa: PLC0415

        kernel = Kernel(threads=threads, sqrt_mode=sqrt_mode)
        weights, grad, moments, out = tensors.weights.detach(), tensors.grad, list[object](tensors.moments), None
        if kind == "bf16":
            grad, out = tensors.short_grad, tensors.copy
        if kind == "q8":
            moments = list(tensors.codes)
        if kind == "bf16-moments":
            moments = list(tensors.short_moments)
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


def _torch(kind: str, **options: bool) -> Callable[[Tensors, int], Step]:
    def make(tensors: Tensors, threads: int) -> Step:
        torch.set_num_threads(threads)
        weights, grad = tensors.weights, tensors.grad
        optimizer = torch.optim.AdamW([weights], lr=_LR, **options)
        mean, square = tensors.moments
        optimizer.state[weights] = {"step": torch.tensor(0.0), "exp_avg": mean, "exp_avg_sq": square}
        weights.grad = grad

        def run() -> None:
            if kind == "bf16":
                grad.copy_(tensors.short_grad)
            if kind == "clip":
                # It is scaled in place, so that later steps find it at the bound; that costs the same.
                torch.nn.utils.clip_grad_norm_([weights], _MAX_NORM)
            optimizer.step()
            if kind == "bf16":
                tensors.copy.copy_(weights.detach())

        return run

    return make


def _deepspeed(tensors: Tensors, threads: int) -> Step:
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder  # noqa: PLC0415

        op = CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # a compiler that is missing, a header, a version
        raise NotOffered(f"cpu_adam cannot be built here: {error}") from error
    torch.set_num_threads(threads)
    # With decoupled weight decay, and without a log.
    op.create_adam(0, _LR, 0.9, 0.999, 1e-8, 1e-2, True, False)  # noqa: FBT003
    weights, step = tensors.weights.detach(), 0

    def run() -> None:
        nonlocal step
        step += 1
        numbers = (weights, tensors.grad, *tensors.moments)
        op.adam_update(0, step, _LR, 0.9, 0.999, 1e-8, 1e-2, True, *numbers)  # noqa: FBT003

    return run


OURS = "deepnvme"


def rows() -> list[Row]:
    """Return all rows. Ratios compare each tool with the one that is named :data:`OURS`."""
    return [
        Row(
            "fp32",
            _F32_BYTES,
            [
                Tool(OURS, _ours("fp32")),
                Tool("deepnvme, torch's roots on AMD", _ours("fp32", "two-step")),
                Tool("torch, fused", _torch("fp32", fused=True)),
                Tool("torch, foreach", _torch("fp32", foreach=True)),
                Tool("torch, as it comes", _torch("fp32")),
                Tool("DeepSpeed cpu_adam", _deepspeed),
            ],
        ),
        Row(
            "bf16 gradient and copy",
            _BF16_BYTES,
            [
                Tool(OURS, _ours("bf16")),
                Tool("torch, fused, with casts", _torch("bf16", fused=True)),
            ],
        ),
        Row(
            "norm, clip and step",
            _CLIP_BYTES,
            [Tool(OURS, _ours("clip")), Tool("torch, fused", _torch("clip", fused=True))],
        ),
        Row("bf16 moments", 20, [Tool(OURS, _ours("bf16-moments"))]),
        Row("8-bit moments", 16 + 8 / 32, [Tool(OURS, _ours("q8"))]),
    ]
