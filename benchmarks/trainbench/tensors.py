"""Parameters in the shapes of a transformer, gradients, and some elements that torch steps as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

LR, WEIGHT_DECAY = 1e-3, 0.01
# Random numbers are made once and repeated. A prime, so that no two parameters have the same.
_NUMBERS = 16_777_259
_WIDTHS = (2048, 1024, 512, 256, 128, 64)
# The largest width with at least this many blocks is taken.
_BLOCKS_MIN = 8
# About so many elements are compared with torch's; of fewer, all of them.
_PROBES = 1 << 20
# Relative and absolute. Steps of LR move an element by a hundred times as much.
_TOLERANCE = {torch.float32: (1e-5, 1e-7), torch.bfloat16: (2**-7, 1e-6)}


def shapes(elements: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer's parameters, with exactly that many elements in all."""
    width = next((one for one in _WIDTHS if _BLOCKS_MIN * 12 * one * one <= elements), _WIDTHS[-1])
    wide = 4 * width
    block: list[tuple[int, ...]] = [
        *((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (wide, width), (wide,), (width, wide), (width,)),
    ]
    size = sum(_count(shape) for shape in block)
    blocks = elements // size
    words, rest = divmod(elements - blocks * size, width)
    # Tables are no larger than the largest of the matrices.
    tables = [(min(wide, words - begin), width) for begin in range(0, words, wide)]
    return [*tables, *(block * blocks), *([(rest,)] if rest else [])]


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class Numbers:
    """Random numbers, the same for each caller that asks for as many with the same seed."""

    def __init__(self, seed: int, scale: float) -> None:
        self._numbers = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(seed)).mul_(scale)
        self._at = 0

    def fill(self, flat: torch.Tensor) -> None:
        """Fill a flat tensor with those that come next."""
        begin = 0
        while begin < flat.numel():
            count = min(flat.numel() - begin, _NUMBERS - self._at)
            flat[begin : begin + count].copy_(self._numbers[self._at : self._at + count])
            begin, self._at = begin + count, (self._at + count) % _NUMBERS


def weights() -> Numbers:
    """Return the initial values of parameters."""
    return Numbers(1, 0.02)


def gradients() -> Numbers:
    """Return the values of gradients."""
    return Numbers(2, 0.01)


def rate(step: int) -> float:
    """Return the learning rate of a step. No two steps in a row have the same."""
    return LR / (1 + step % 3)


def _probe(flats: Iterable[torch.Tensor], elements: int) -> torch.Tensor:
    """Return every n-th element of all tensors, in order."""
    stride = max(1, elements // _PROBES) | 1

    def parts() -> Iterator[torch.Tensor]:
        at = 0
        for flat in flats:
            yield flat.detach()[-at % stride :: stride]
            at += flat.numel()

    return torch.cat(list(parts()))


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison with torch."""

    is_equal: bool
    """To the last bit."""
    is_close: bool
    difference: float
    """The largest."""
    probes: int


class Reference:
    """Some elements, which the plain loop of ``torch.optim.AdamW`` steps.

    Args:
        parameters: flat, before the first step.
        gradients: flat, in the same order; the same in each step.
        elements: of all parameters.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor], elements: int
    ) -> None:
        self._elements, self._dtype, self._steps = elements, parameters[0].dtype, 0
        self._stepped = torch.nn.Parameter(_probe(parameters, elements).float())
        self._stepped.grad = _probe(gradients, elements).float()
        self._optimizer = torch.optim.AdamW(
            [self._stepped], lr=LR, weight_decay=WEIGHT_DECAY, foreach=False, fused=False
        )

    def compare(self, parameters: Iterable[torch.Tensor], steps: int) -> Verdict:
        """Step the reference to this many steps, and compare."""
        while self._steps < steps:
            self._optimizer.param_groups[0]["lr"] = rate(self._steps)
            self._optimizer.step()
            self._steps += 1
        found, expected = _probe(parameters, self._elements), self._stepped.detach().to(self._dtype)
        relative, absolute = _TOLERANCE[self._dtype]
        return Verdict(
            is_equal=torch.equal(found, expected),
            is_close=torch.allclose(found.float(), expected.float(), rtol=relative, atol=absolute),
            difference=float((found.float() - expected.float()).abs().max()),
            probes=found.numel(),
        )
