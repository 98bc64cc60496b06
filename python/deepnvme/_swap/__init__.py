"""Tensors by key in bounded memory and a swap file: :class:`Swapper`.

- ``swapper``: the public class. The extension moves the bytes.
- ``arguments``: checks of keys and folders.
- ``view``: tensor views of swapped bytes, and :class:`Borrowed`.
- ``stats``: counters.
"""

from deepnvme._swap.stats import SwapStats
from deepnvme._swap.swapper import Swapper
from deepnvme._swap.view import Borrowed

__all__ = ["Borrowed", "SwapStats", "Swapper"]
