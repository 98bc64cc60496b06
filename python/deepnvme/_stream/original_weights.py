"""Give a module its weights back when streaming ends: the previous ones, with the changes that it made meanwhile.

Placeholders come in place of those that had no values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._modules.weight_classes import Placeholder, has_no_values
from deepnvme._stream.parameter_binding import get_weight, have_same_bytes, is_streamed, set_weight
from deepnvme._utils.tensors import without_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepnvme._modules.partition import Weight
    from deepnvme._modules.weight_classes import Gate


class OriginalWeights:
    """The weights of a module before it was streamed.

    Those on the meta device do not come back at a close: torch multiplies CPU tensors by meta tensors without an error,
    and returns memory that nobody has written. Placeholders come in their place, whose use is an error.

    Args:
        weights: all streamed weights, once for each module that has them.
        gate: makes the error of a use of the placeholders.
    """

    def __init__(self, weights: Iterable[Weight], gate: Gate) -> None:
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


class ChangedBuffers:
    """The tensors that modules have changed, by those that were there before streaming began.

    Modules that share one share its changes.
    """

    def __init__(self) -> None:
        self._changed: dict[int, torch.Tensor] = {}
        self._resident: dict[int, _Resident] = {}
        # Their ids stay valid.
        self._originals: list[torch.Tensor] = []

    def get(self, original: torch.Tensor) -> torch.Tensor | None:
        """Return the changed tensor, if there is one."""
        return self._changed.get(id(original))

    def keep(self, original: torch.Tensor, changed: torch.Tensor) -> None:
        """Keep a tensor that a module has changed."""
        self._originals.append(original)
        self._changed[id(original)] = changed

    def watch(self, original: torch.Tensor, loaded: torch.Tensor) -> None:
        """Remember a weight or buffer that stays in memory. Modules change it there."""
        self._originals.append(original)
        self._resident[id(original)] = _Resident(loaded)

    def restored(self, original: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a module gets when streaming ends: the original, with the changes."""
        changed = self._changed.get(id(original))
        resident = self._resident.get(id(original))
        if resident is not None and resident.is_changed():
            changed = resident.tensor
        if changed is None:
            return original
        # Inference tensors could not be changed by later calls outside of that mode.
        with torch.inference_mode(mode=False):
            if has_no_values(original) or original.is_inference():
                # Modules that share it get one tensor, without the memory of the other weights.
                own = changed.detach().clone()
                if isinstance(changed, nn.Parameter):
                    own = nn.Parameter(own, requires_grad=original.requires_grad)
                self._changed[id(original)] = own
                return own
            return without_gradients(original.copy_, changed)


def _closed_placeholder(name: str, original: torch.Tensor, gate: Gate) -> torch.Tensor:
    # Inference tensors could not become parameters of other calls.
    with torch.inference_mode(mode=False):
        made: torch.Tensor = Placeholder(name, original.shape, original.dtype, original.device, gate, original.stride())
        if isinstance(original, nn.Parameter):
            made = nn.Parameter(made, requires_grad=original.requires_grad)
        # Attributes that other libraries have set.
        vars(made).update(vars(original))
    return made


class _Resident:
    """A tensor in memory, and how to notice a change of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._address, self._version = tensor.data_ptr(), tensor._version  # noqa: SLF001
        # Batch norm changes its statistics without counting.
        self._copy = None if isinstance(tensor, nn.Parameter) else tensor.clone()

    def is_changed(self) -> bool:
        """Whether it has other values or other memory than before."""
        if (self.tensor.data_ptr(), self.tensor._version) != (self._address, self._version):  # noqa: SLF001
            return True
        return self._copy is not None and not have_same_bytes(self.tensor, self._copy)
