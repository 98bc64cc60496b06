"""Tensors of a state dict that are copies of what is on disk or in another format: filling them loads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

# By remedy, then by `id`: the copies that still exist.
_COPIES: dict[str, WeakValueDictionary[int, torch.Tensor]] = {}


def mark_copies(copies: Iterable[torch.Tensor], remedy: str) -> None:
    """Remember copies that a state dict returns.

    Args:
        copies: the tensors.
        remedy: how to load a state instead, for the message.
    """
    known = _COPIES.setdefault(remedy, WeakValueDictionary())
    for tensor in copies:
        known[id(tensor)] = tensor


def find_copy(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the name of a tensor that is a copy, and the remedy. ``None`` if there is none."""
    for remedy, known in _COPIES.items():
        if not known:
            continue
        for name, tensor in tensors.items():
            if known.get(id(tensor)) is tensor:
                return name, remedy
    return None
