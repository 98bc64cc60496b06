"""Tensors that stay on disk while nobody uses them.

``swapper`` is the whole of it: dtypes and shapes over the bytes that the extension swaps. ``stats`` is what it cost.
"""

from deepnvme._swap.stats import SwapStats
from deepnvme._swap.swapper import Lend, Swapper

__all__ = ["Lend", "SwapStats", "Swapper"]
