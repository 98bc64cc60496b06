"""Keep the values that modules change while they are streamed: of buffers, and of weights that stay in memory."""

from __future__ import annotations

import torch
from torch import nn

from deepnvme._modules.weight_classes import has_no_values
from deepnvme._utils.tensors import without_gradients


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


def have_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
