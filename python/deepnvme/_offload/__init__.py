"""Keep parameters and activations on disk while nothing uses them.

- ``begin``: the public function. ``parameter_offload``: the public class, which holds what the function has begun.
- ``groups`` finds the parameters that are moved together. ``residence`` holds them in memory while they are in use,
  puts placeholders in their place otherwise, and notices forbidden changes.
- ``passes`` follows a block through forward and backward. Autograd saves references to weights, not their memory.
- ``stepping`` runs an optimizer group by group.
- ``activations``: the public function and class for tensors that autograd saves. ``saved_tensors``: hooks for them.
- ``training``: the public function for all parts under one bound. ``plan``: its traffic. ``disk_speed`` measures.
- ``spilling``: the public function and class for phases without a model in memory. ``storages``: that memory.
- ``state_dicts`` fills, loads and saves the state dicts of parameters on disk.
"""

from deepnvme._offload.activations import ActivationOffload, ActivationStats, offload_activations
from deepnvme._offload.begin import offload_parameters
from deepnvme._offload.parameter_offload import ParameterOffload
from deepnvme._offload.plan import OffloadPlan, PartPlan
from deepnvme._offload.spilling import Spilled, spill
from deepnvme._offload.training import offload

__all__ = [
    "ActivationOffload",
    "ActivationStats",
    "OffloadPlan",
    "ParameterOffload",
    "PartPlan",
    "Spilled",
    "offload",
    "offload_activations",
    "offload_parameters",
    "spill",
]
