"""Placeholders for parameters on disk: shape and dtype without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._stream.placeholder import OnDiskParameter, on_disk_message
from deepnvme._utils.tensors import without_memory, without_override
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from deepnvme._offload.groups import Member


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Placeholder:
    """Stands for a parameter on disk.

    It has no memory, so that code that bypasses ``OnDiskParameter`` gets an error too. Where torch cannot make such a
    tensor, it is one NaN, expanded to the parameter's shape.
    """

    def __init__(self, member: Member) -> None:
        self._parameter = member.parameter
        self._kind = type(member.parameter)
        message = on_disk_message(member.name, "It was read or changed")
        bare = without_memory(member.shape, member.stride, member.dtype, message)
        has_nan = member.dtype.is_floating_point or member.dtype.is_complex
        number = torch.full((1,), float("nan") if has_nan else 0, dtype=member.dtype)
        self._number = number.view(torch.uint8) if bare is None else None
        self._bytes = number.view(torch.uint8).clone()
        self._data = number[0].expand(member.shape) if bare is None else bare

    def install(self) -> None:
        """Point the parameter at the placeholder."""
        self.replace(self._data)
        if self._kind is nn.Parameter:
            self._parameter.__class__ = OnDiskParameter

    def replace(self, data: torch.Tensor) -> None:
        """Point the parameter at other data."""
        self._parameter.__class__ = self._kind
        self._parameter.data = data

    def is_changed(self) -> bool:
        """Whether the parameter got other data, or the placeholder's number another value."""
        data, expected = without_override(_DATA, self._parameter), self._data
        if (data.dtype, data.shape) != (expected.dtype, expected.shape):
            return True
        if self._number is None:
            return bool(torch._C._has_storage(data))  # noqa: SLF001
        return data.data_ptr() != expected.data_ptr() or not torch.equal(self._number, self._bytes)

    def repair(self) -> None:
        """Undo such a change."""
        if self._number is not None:
            self._number.copy_(self._bytes)
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
