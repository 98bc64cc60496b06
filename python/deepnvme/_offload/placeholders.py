"""Placeholders for parameters on disk: shape and dtype without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from deepnvme._offload.groups import Member


# What needs no values: attributes, and functions by name.
_VALUE_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "real", "imag"))
_WITHOUT_VALUES = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
     "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "is_same_size", "is_pinned",
     "get_device", "dim_order", "has_names", "_is_view", "_is_zerotensor", "__len__", "__hash__", "__dir__",
     "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad", "result_type",
     "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
     "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "_has_compatible_shallow_copy_type")
)  # fmt: skip
# They return the tensor itself if there is nothing to convert.
_CONVERSIONS = frozenset(("to", "type", "type_as", "cpu", "float", "double", "half", "bfloat16"))


class OnDiskParameter(nn.Parameter):
    """The class of a parameter while it is on disk. Whatever needs its values raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that need no values."""
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_allowed = name in _WITHOUT_VALUES
        if name in ("__get__", "__set__", "__delete__"):
            if attribute == "data" and name == "__set__" and args[1] is args[0]:
                return None  # `Module.to` without a change
            is_allowed = attribute not in _VALUE_ATTRIBUTES and not (attribute == "data" and name == "__set__")
        elif name in _CONVERSIONS or name == "detach":
            is_allowed = True
        if not is_allowed:
            raise cls._refusal(f"{attribute}.{name}" if attribute else name)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            result = func(*args, **(kwargs or {}))
        if name == "detach" or (name == "__get__" and attribute == "data"):
            # Another tensor with the placeholder's number.
            result.__class__ = OnDiskParameter
        elif name in _CONVERSIONS and result is not args[0] and isinstance(result, torch.Tensor):
            raise cls._refusal(name)
        return result

    @staticmethod
    def _refusal(what: str) -> Exception:
        return RuntimeError(
            f"a parameter is on disk: it is in memory only while its block runs. {what} was called on it from "
            "elsewhere; use it within `with model.offloading.gathered([parameter]):`, or call model.offloading.close() "
            "first"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise self._refusal("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refusal("pickle")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDiskParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


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
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            data, expanded = self._parameter.data, self._expanded
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
