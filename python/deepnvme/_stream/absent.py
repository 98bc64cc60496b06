"""What stands in a module where a weight is on disk: shape, dtype and device of it, and no bytes."""

from __future__ import annotations

from typing import Any

import torch


class Absent(torch.Tensor):
    """A weight that is not in memory.

    Whoever counts parameters, or asks for dtype and device, gets an answer; whoever computes with it is told that the
    module which it belongs to was gone past.
    """

    weight_name: str

    @staticmethod
    def __new__(  # noqa: PYI034 (what torch makes is of the class that it is told)
        cls: type[Absent], name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Absent:
        """Make one."""
        made: Absent = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # noqa: SLF001
        made.weight_name = name
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise RuntimeError(f"{self.weight_name} is on disk; what is to be saved has to be in memory")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Absent({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse whatever needs bytes."""
        first = args[0] if args else None
        if func in _ALIASES and isinstance(first, Absent):
            return Absent(first.weight_name, first.shape, first.dtype, first.device)
        names = [each.weight_name for each in (*args, *(kwargs or {}).values()) if isinstance(each, Absent)]
        what = names[0] if names else "a weight"
        raise RuntimeError(
            f"{what} is on disk: it is in memory only while the module that it belongs to runs. {func} was called on "
            "it from elsewhere; call the module itself, or close the streaming and load the weights into memory"
        )


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def placeholder(name: str, like: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """Make what stands for a parameter while it is on disk."""
    return torch.nn.Parameter(Absent(name, like.shape, like.dtype, device), requires_grad=False)
