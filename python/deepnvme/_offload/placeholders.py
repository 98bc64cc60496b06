"""Placeholders for parameters on disk: shape and dtype without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._stream.placeholder import OnDiskParameter
from deepnvme._utils.tensors import without_override
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from deepnvme._offload.groups import Member


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Placeholder:
    """Stands for a parameter on disk: one NaN, expanded to its shape."""

    def __init__(self, member: Member) -> None:
        has_nan = member.dtype.is_floating_point or member.dtype.is_complex
        self._parameter = member.parameter
        self._number = torch.full((1,), float("nan") if has_nan else 0, dtype=member.dtype)
        self._bytes = self._number.view(torch.uint8).clone()
        self._expanded = self._number[0].expand(member.shape)
        self._kind = type(member.parameter)

    def install(self) -> None:
        """Point the parameter at the placeholder."""
        self.replace(self._expanded)
        if self._kind is nn.Parameter:
            self._parameter.__class__ = OnDiskParameter

    def replace(self, data: torch.Tensor) -> None:
        """Point the parameter at other data."""
        self._parameter.__class__ = self._kind
        self._parameter.data = data

    def is_changed(self) -> bool:
        """Whether the parameter got other data, or the placeholder's number another value."""
        data, expanded = without_override(_DATA, self._parameter), self._expanded
        is_installed = (
            data.data_ptr() == expanded.data_ptr() and data.dtype == expanded.dtype and data.shape == expanded.shape
        )
        return not (is_installed and torch.equal(self._number.view(torch.uint8), self._bytes))

    def repair(self) -> None:
        """Undo such a change."""
        self._number.view(torch.uint8).copy_(self._bytes)
        self.install()


def replace_meta_parameters(model: nn.Module) -> None:
    """Replace each parameter on the meta device by zeros that need no memory.

    A parameter cannot change its device, so these are new objects. Shared parameters stay shared.

    Raises:
        UnsupportedError: a buffer is on the meta device, and its values are unknown.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedError(
                f"the buffer {name} is on the meta device and has no values; assign a tensor to it first"
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
