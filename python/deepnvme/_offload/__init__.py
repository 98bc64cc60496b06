"""Keep parameters on disk while nothing uses them: :func:`offload_parameters`.

- ``begin``: the public function. ``parameter_offload``: the public class, which holds what the function has begun.
- ``groups`` finds the parameters that are moved together. ``residence`` holds them in memory while they are in use,
  and notices forbidden changes.
- ``passes`` follows a block through forward and backward. ``autograd`` saves references to weights, not their memory.
- ``stepping`` runs an optimizer group by group.
- ``hooks``: what watches the model's steps and those of all optimizers.
- ``state_dicts`` fills, loads and saves the state dicts of parameters on disk.
- ``placeholders``: the stand-in data of a parameter while its bytes are on disk.
"""

from deepnvme._offload.begin import offload_parameters
from deepnvme._offload.parameter_offload import ParameterOffload

__all__ = ["ParameterOffload", "offload_parameters"]
