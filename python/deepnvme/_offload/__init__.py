"""Keep tensors and parameters on disk while nothing uses them.

- ``swapper``, ``view``, ``stats``: :class:`Swapper`, tensors by key in bounded memory and a swap file.
- ``parameter_offload``: :func:`offload_parameters`, parameters that are on disk between a model's blocks.
- ``groups`` finds the parameters that are moved together. ``residence`` holds them in memory while they are in use.
- ``passes`` follows a block through forward and backward. ``autograd`` saves references to weights, not their memory.
- ``stepping`` runs an optimizer group by group. ``saving`` writes a model shard by shard.
- ``placeholders``: the stand-in data of a parameter while its bytes are on disk.
"""

from deepnvme._offload.parameter_offload import ParameterOffload, offload_parameters
from deepnvme._offload.stats import SwapStats
from deepnvme._offload.swapper import Swapper
from deepnvme._offload.view import Borrowed

__all__ = ["Borrowed", "ParameterOffload", "SwapStats", "Swapper", "offload_parameters"]
