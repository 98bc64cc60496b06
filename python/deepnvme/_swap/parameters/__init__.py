"""Parameters that are on disk while no block uses them, in training.

``units`` finds purely what comes and goes together, ``residence`` has it in memory while somebody needs it, ``passes``
follows a block through its forward and backward, ``saved`` keeps autograd from holding on to memory that others need,
``stepping`` has an optimizer change one unit after the other, ``offload`` puts that together and is the face.
"""

from deepnvme._swap.parameters.offload import Offloaded, offload_parameters

__all__ = ["Offloaded", "offload_parameters"]
