"""Give a module its previous weights back when streaming ends, or placeholders for those that had no values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._modules.weight_classes import Placeholder
from deepnvme._stream.parameter_binding import get_weight, is_streamed, set_weight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepnvme._modules.partition import Weight
    from deepnvme._stream.call_gate import CallGate
    from deepnvme._stream.changed_buffers import ChangedBuffers


class OriginalWeights:
    """The weights of a module before it was streamed.

    Those on the meta device do not come back at a close: torch multiplies CPU tensors by meta tensors without an error,
    and returns memory that nobody has written. Placeholders come in their place, whose use is an error.

    Args:
        weights: all streamed weights, once for each module that has them.
        gate: explains uses of the placeholders.
    """

    def __init__(self, weights: Iterable[Weight], gate: CallGate) -> None:
        self._weights = [(weight, get_weight(weight)) for weight in weights]
        self._gate = gate
        # By the id of the original: modules that share it share the placeholder.
        self._placeholders: dict[int, torch.Tensor] = {}
        self.returns_meta = False
        """Whether tensors on the meta device come back as well, because streaming never began."""

    def restore(self, changed: ChangedBuffers) -> None:
        """Give them back, with the changes that modules made. An interrupted call can be repeated."""
        for weight, original in self._weights:
            # A tensor that the caller has assigned in the meantime stays.
            if is_streamed(weight):
                set_weight(weight, self._restored(weight, original, changed))

    def _restored(self, weight: Weight, original: torch.Tensor, changed: ChangedBuffers) -> torch.Tensor:
        restored = changed.restored(original)
        if self.returns_meta or not restored.is_meta or isinstance(restored, Placeholder):
            return restored
        if id(original) not in self._placeholders:
            self._placeholders[id(original)] = _closed_placeholder(weight.name, original, self._gate)
        return self._placeholders[id(original)]

    def clear(self) -> None:
        """Forget them."""
        self._weights, self._placeholders = [], {}


def _closed_placeholder(name: str, original: torch.Tensor, gate: CallGate) -> torch.Tensor:
    # Inference tensors could not become parameters of other calls.
    with torch.inference_mode(mode=False):
        made: torch.Tensor = Placeholder(name, original.shape, original.dtype, original.device, gate, original.stride())
        if isinstance(original, nn.Parameter):
            made = nn.Parameter(made, requires_grad=original.requires_grad)
        # Attributes that other libraries have set.
        vars(made).update(vars(original))
    return made
