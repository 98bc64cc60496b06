"""What a parameter shows while its bytes are on disk: its shape and dtype, in no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from deepnvme._offload.groups import Member


class Placeholder:
    """Stands for a parameter: one number that is none, so that nobody computes with it unnoticed."""

    def __init__(self, member: Member) -> None:
        has_nan = member.dtype.is_floating_point or member.dtype.is_complex
        self._parameter = member.parameter
        self._number = torch.full((1,), float("nan") if has_nan else 0, dtype=member.dtype)
        self._bytes = self._number.view(torch.uint8).clone()
        self._shown = self._number[0].expand(member.shape)

    def install(self) -> None:
        """Have the parameter show it."""
        self._parameter.data = self._shown

    def is_changed(self) -> bool:
        """Whether the parameter was given other data, or the number another value."""
        data, shown = self._parameter.data, self._shown
        is_shown = data.data_ptr() == shown.data_ptr() and data.dtype == shown.dtype and data.shape == shown.shape
        return not (is_shown and torch.equal(self._number.view(torch.uint8), self._bytes))

    def repair(self) -> None:
        """Undo such a change."""
        self._number.view(torch.uint8).copy_(self._bytes)
        self.install()


def replace_meta_parameters(model: nn.Module) -> None:
    """Have zeros that take no memory in the place of each parameter that is on the meta device.

    A parameter cannot move from one device to another, so that they are new ones; shared ones stay shared.

    Raises:
        UnsupportedError: a buffer is on the meta device, and nobody knows what belongs into it.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedError(
                f"the buffer {name} is on the meta device, and nobody knows what belongs into it: give "
                "the model a tensor for it first"
            )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                zero = torch.zeros((), dtype=parameter.dtype)
                made[parameter] = nn.Parameter(zero.expand(parameter.shape), requires_grad=parameter.requires_grad)
                vars(made[parameter]).update(vars(parameter))
            module._parameters[name] = made[parameter]  # noqa: SLF001
