"""Hooks that see each tensor that autograd saves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import _SavedHooksScope

if TYPE_CHECKING:
    from collections.abc import Callable


class SavedTensorHooks(_SavedHooksScope):
    """A ``with`` block with hooks for saved tensors, as ``torch.autograd.graph.saved_tensors_hooks``.

    torch's own stay if Ctrl-C comes at their begin or end. And their exit removes the innermost hooks, even if those
    belong to another block by then.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._functions = (pack, unpack)

    def _make_hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        return self._functions


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that stays in memory, at a version."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class OuterTensor:
    """A tensor that the surrounding hooks have packed, and their unpack function."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


def outer_hooks() -> Any:
    """Return the innermost hooks of this thread, for packing and unpacking; ``None`` if there are none.

    They surround hooks that are about to be entered.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001


def keep(tensor: torch.Tensor, outer: Any) -> KeptTensor | OuterTensor:
    """Pack a tensor that hooks leave alone.

    Only the innermost hooks are called, so those around them, such as those of activation checkpointing, get it here.
    """
    if outer is not None:
        return OuterTensor(outer[0](tensor), outer[1])
    # The result of an operation refers to its node, which refers to this. An alias has the same version and no node.
    return KeptTensor(tensor.detach(), tensor._version)  # noqa: SLF001


def kept_tensor(saved: KeptTensor | OuterTensor) -> torch.Tensor:
    """Unpack a tensor that hooks have left alone.

    Raises:
        RuntimeError: it was changed in place. torch itself looks for that only without hooks.
    """
    if isinstance(saved, OuterTensor):
        return saved.unpack(saved.packed)
    if saved.tensor._version != saved.version:  # noqa: SLF001
        msg = (
            "a tensor that the backward pass needs was changed in place after it was used "
            f"(shape {tuple(saved.tensor.shape)})"
        )
        raise RuntimeError(msg)
    return saved.tensor
