"""Models that were never in memory: parameters on the meta device become such of the host, without memory."""

from __future__ import annotations

import torch
from torch import nn

from deepnvme.errors import UnsupportedError


def give_places(model: nn.Module) -> None:
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
