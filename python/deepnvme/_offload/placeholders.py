"""Placeholders for parameters on disk: shape and dtype without memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._modules.weight_classes import BoundParameter, OnDiskParameter, foreign_attributes, on_disk_message
from deepnvme._utils.tensors import without_memory, without_override
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from deepnvme._offload.groups import Member


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class ParameterPlaceholder:
    """Stands for a parameter on disk.

    It has no memory, so that code that bypasses ``OnDiskParameter`` gets an error too. Where torch cannot make such a
    tensor, it is one NaN, expanded to the parameter's shape.
    """

    def __init__(self, member: Member) -> None:
        self._parameter = member.parameter
        self._kind = type(member.parameter)
        # `torch.utils.swap_tensors` would exchange hooks and memory. It refuses parameters with a weak reference.
        self._reference: weakref.ref[nn.Parameter] | None = None
        message = on_disk_message(member.name, "It was read or changed")
        bare = without_memory(member.shape, member.stride, member.dtype, message)
        has_nan = member.dtype.is_floating_point or member.dtype.is_complex
        number = torch.full((1,), float("nan") if has_nan else 0, dtype=member.dtype)
        self._number = number.view(torch.uint8) if bare is None else None
        self._bytes = number.view(torch.uint8).clone()
        self._data = number[0].expand(member.shape) if bare is None else bare

    def install(self) -> None:
        """Point the parameter at the placeholder."""
        self._point_at(self._data, OnDiskParameter)
        # `OnDiskParameter` refuses to be swapped with a better message.
        is_of_ours = type(self._parameter) is OnDiskParameter
        self._reference = None if is_of_ours else weakref.ref(self._parameter)

    def lend(self, data: torch.Tensor, *, is_counted: bool) -> None:
        """Point the parameter at memory that later belongs to others.

        Args:
            data: views the memory.
            is_counted: count changes of the parameter's ``data``. torch does not.
        """
        self._reference = weakref.ref(self._parameter)
        self._point_at(data, BoundParameter if is_counted else nn.Parameter)

    def remove(self, data: torch.Tensor) -> None:
        """Give the parameter memory of its own."""
        self._point_at(data, nn.Parameter)
        self._reference = None

    def _point_at(self, data: torch.Tensor, kind: type[nn.Parameter]) -> None:
        self._parameter.__class__ = self._kind
        self._parameter.data = data
        if self._kind is nn.Parameter:
            self._parameter.__class__ = kind

    def is_changed(self) -> bool:
        """Whether the parameter got other data, or the placeholder's number another value."""
        data, expected = without_override(_DATA, self._parameter), self._data
        if (data.dtype, data.shape) != (expected.dtype, expected.shape):
            return True
        if self._number is None:
            return bool(torch._C._has_storage(data))  # noqa: SLF001
        return data.data_ptr() != expected.data_ptr() or not torch.equal(self._number, self._bytes)

    def repair(self) -> None:
        """Undo a change that :meth:`is_changed` has found."""
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
                vars(made[parameter]).update(foreign_attributes(parameter))
            module._parameters[name] = made[parameter]  # noqa: SLF001
