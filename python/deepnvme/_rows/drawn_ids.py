"""Random ids of rows: uniform, or from a Zipf distribution."""

from __future__ import annotations

import math

import torch

_SEED = 5
_ID_BITS = 62
# The golden ratio spreads consecutive ranks over the table.
_SPREAD = 0.618


class DrawnIds:
    """Draws ids of the rows of a table. The same seed gives the same ids in every run, and each call draws others.

    Args:
        rows: number of rows.
        exponent: that of the Zipf distribution; ``None`` draws uniformly.
    """

    def __init__(self, rows: int, exponent: float | None) -> None:
        self._rows, self._exponent = rows, exponent
        self._generator = torch.Generator().manual_seed(_SEED)
        factor = max(1, min(int(rows * _SPREAD), (1 << _ID_BITS) // rows))
        while math.gcd(factor, rows) != 1:
            factor -= 1
        self._factor = factor

    def draw(self, count: int) -> torch.Tensor:
        """Draw this many ids."""
        if self._exponent is None:
            return torch.randint(0, self._rows, (count,), generator=self._generator)
        uniform = torch.rand(count, generator=self._generator, dtype=torch.float64)
        # The rows used most are not neighbours, as in a table whose order does not depend on use.
        return self._ranks(uniform, self._exponent) * self._factor % self._rows

    def _ranks(self, uniform: torch.Tensor, exponent: float) -> torch.Tensor:
        """Invert the distribution, as a continuous one from 1 to the number of rows and 1; the first rank is 0."""
        end = self._rows + 1
        if math.isclose(exponent, 1):
            place = end**uniform
        else:
            power = 1 - exponent
            place = (uniform * (end**power - 1) + 1) ** (1 / power)
        return (place.long() - 1).clamp(0, self._rows - 1)
