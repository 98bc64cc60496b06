"""Tensors that stand for weights on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deepnvme._stream.call_gate import CallGate


class Placeholder(torch.Tensor):
    """Shape, dtype and device of a weight on disk, without bytes.

    Code that counts parameters or asks for dtype and device works. Code that computes with it gets an error that
    explains that it bypassed the module, or that the model was closed.
    """

    weight_name: str
    gate: CallGate

    @staticmethod
    def __new__(  # noqa: PLR0917, PYI034 (torch returns an instance of the given class)
        cls: type[Placeholder],
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        gate: CallGate,
    ) -> Placeholder:
        """Make one."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # noqa: SLF001
        made.weight_name = name
        made.gate = gate
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        if self.gate.is_closed:
            raise self.gate.closed_error(f"{self.weight_name} is on disk: ")
        raise RuntimeError(f"{self.weight_name} is on disk and cannot be pickled; load the weights into memory first")

    def _refused(self, what: str) -> Exception:
        if self.gate.is_closed:
            return self.gate.closed_error(f"{self.weight_name} is on disk: ")
        return RuntimeError(
            f"{self.weight_name} is on disk: it is in memory only while its module runs. {what} was called on it from "
            "elsewhere; call the module itself, or close the streaming and load the weights into memory"
        )

    # These would reach for memory without an operation that `__torch_dispatch__` sees.

    def share_memory_(self) -> Any:
        """Refuse."""
        raise self._refused("share_memory_")

    def untyped_storage(self) -> Any:
        """Refuse."""
        raise self._refused("untyped_storage")

    def __dlpack__(self, *_: object, **__: object) -> Any:
        raise self._refused("__dlpack__")

    @property
    def data(self) -> torch.Tensor:
        """The placeholder itself, detached. Other tensors cannot be assigned."""
        found: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `Module.to` without a change assigns it to itself.
        if not isinstance(value, Placeholder):
            raise self._refused("an assignment of data")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Placeholder({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse operations that need bytes."""
        first = next(_placeholders((*args, *(kwargs or {}).values())))
        if func in _ALIASES:
            return Placeholder(first.weight_name, first.shape, first.dtype, first.device, first.gate)
        raise first._refused(str(func))  # noqa: SLF001


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _placeholders(values: Iterable[Any]) -> Iterator[Placeholder]:
    for value in values:
        if isinstance(value, Placeholder):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _placeholders(value)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device or stands for a weight on disk."""
    return tensor.is_meta or isinstance(tensor, Placeholder)
