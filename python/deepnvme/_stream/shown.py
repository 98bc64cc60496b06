"""What stands in modules for their weights: the weights while they run, and what says that they are on disk else."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from deepnvme._stream.absent import placeholder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from deepnvme._stream.partition import Weight
    from deepnvme._stream.pieces import Origin


class Shown:
    """The weights that come and go together.

    Args:
        weights: by the modules that have them.
        device: of the weights when they are there.
    """

    def __init__(self, weights: Sequence[Weight], device: torch.device) -> None:
        self._weights = list(weights)
        self.originals = [get(weight) for weight in weights]
        self._placeholders = [
            placeholder(weight.name, original, device) for weight, original in zip(weights, self.originals, strict=True)
        ]
        self._lock = threading.Lock()
        self._users = 0
        self._put(self._placeholders)

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the modules use these, until as many calls of ``hide`` have come."""
        with self._lock:
            self._users += 1
            # Also where another thread has done so: what a call that was broken off has left here is replaced.
            self._put(tensors)

    def hide(self) -> None:
        """Take them out again, unless another thread uses them still."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users == 0:
                self._put(self._placeholders)

    def restore(self) -> None:
        """Have the modules use what stood in them at first."""
        with self._lock:
            self._put(self.originals)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            put(weight, tensor)


def put(weight: Weight, tensor: nn.Parameter | torch.Tensor) -> None:
    """Have a module use that tensor, past ``nn.Module.__setattr__``, which would look at it at every step."""
    module = weight.module
    if weight.attribute in module._parameters:  # noqa: SLF001
        module._parameters[weight.attribute] = tensor  # type: ignore[assignment]  # noqa: SLF001
    else:
        module._buffers[weight.attribute] = tensor  # noqa: SLF001


def get(weight: Weight) -> torch.Tensor:
    """Look at what a module has now."""
    tensor: torch.Tensor = getattr(weight.module, weight.attribute)
    return tensor


def view(memory: torch.Tensor, at: int, origin: Origin, like: torch.Tensor) -> nn.Parameter | torch.Tensor:
    """See a weight in memory that has its bytes."""
    flat = memory[at : at + origin.memory_nbytes].view(origin.memory_dtype)
    shaped = flat.view(like.shape)
    return torch.nn.Parameter(shaped, requires_grad=False) if isinstance(like, torch.nn.Parameter) else shaped
