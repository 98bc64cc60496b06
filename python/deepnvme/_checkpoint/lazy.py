"""Tensors that are read at their first use."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Names of attributes that need no bytes: what a tensor on the meta device knows, too.
_META = ("shape", "dtype", "ndim", "layout", "is_sparse", "is_quantized", "is_nested", "names", "itemsize", "nbytes")


class LazyTensor(torch.Tensor):
    """A tensor whose bytes are still in the file. Any operation on it reads them, once."""

    _read: Callable[[], torch.Tensor]
    _device: torch.device
    _lock: threading.Lock
    _real: torch.Tensor | None

    @staticmethod
    def make(described: torch.Tensor, device: torch.device, read: Callable[[], torch.Tensor]) -> LazyTensor:
        """Stand for the tensor that ``read`` gives; ``described`` has its sizes, on the meta device."""
        lazy = described.as_subclass(LazyTensor)
        vars(lazy).update(_read=read, _device=device, _lock=threading.Lock(), _real=None)
        return lazy

    def materialize(self) -> torch.Tensor:
        """Give the real tensor, which is read the first time."""
        with self._lock:
            if self._real is None:
                self._real = self._read()
            return self._real

    def read(self) -> torch.Tensor:
        """Give the real tensor, and do not keep it."""
        with self._lock:
            return self._read() if self._real is None else self._real

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any operation on the real tensors; what needs no bytes is answered without."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(func.__self__, "__name__", "")
            if attribute in _META:
                return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if attribute == "device":
                return vars(args[0])["_device"]
        if name in ("size", "dim", "stride", "numel", "element_size", "__len__", "storage_offset", "is_contiguous"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name == "detach":
            return args[0].derive(torch.Tensor.detach)
        made = func(*_real(args), **_real(kwargs or {}))
        # A parameter is made by these two, and only of what stays of its type.
        return args[0] if name == "requires_grad_" else made

    def derive(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        """Stand for what a function makes of the real tensor, of the same sizes and type."""
        described = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return LazyTensor.make(described, self._device, lambda: function(self.materialize()))

    def __hash__(self) -> int:
        # As of any tensor, by identity; the inherited way would read it.
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"LazyTensor(shape={shape}, dtype={self.dtype}, device={self._device}, read={self._real is not None})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _real(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.materialize()
    if isinstance(value, tuple | list):
        return type(value)(_real(element) for element in value)
    if isinstance(value, dict):
        return {key: _real(element) for key, element in value.items()}
    return value
