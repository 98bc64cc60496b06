"""Tensors by key in bounded memory and a swap file: :class:`Swapper`.

- ``swapper``: the public class. The extension moves the bytes.
- ``values``: its arguments and results, among them :class:`Borrowed` and the counters.
"""

from deepnvme._swap.swapper import Swapper
from deepnvme._swap.values import Borrowed, SwapStats

__all__ = ["Borrowed", "SwapStats", "Swapper"]
