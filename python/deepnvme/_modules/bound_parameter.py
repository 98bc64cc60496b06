"""The class of a parameter while it views memory that is reused: changes through ``data`` count."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class BoundParameter(nn.Parameter):
    """A parameter in memory that later belongs to others.

    torch does not count changes of ``weight.data``. Such a change would go into that memory and be lost in silence.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values without a gradient. Changes of them count as changes of the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assign_data(self, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """Copy it as torch's own class: the copy has memory of its own."""
        made = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = made
        return made


class FixedParameter(BoundParameter):
    """A bound parameter whose data cannot be assigned: the tensor is used again for later weights."""

    @property
    def data(self) -> torch.Tensor:
        """The values without a gradient. Changes of them count as changes of the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `Module.to` without a change assigns the same memory.
        if (value.data_ptr(), value.dtype, value.shape) != (self.data_ptr(), self.dtype, self.shape):
            raise RuntimeError(
                "the data of a weight were assigned while it is streamed from its file, and the change would be lost; "
                "call model.streaming.close() first, and assign them then"
            )


assign_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
