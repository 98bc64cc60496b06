"""Values of a state that are no tensors, such as the number of a step."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from deepnvme._checkpoint.state_walk import Keys, each_tensor, each_with_keys

_MISSING = object()


def has_values(state: Any) -> bool:
    """Whether a state contains anything but tensors, and containers of them."""
    return any(not isinstance(found, torch.Tensor | Mapping | list | tuple) for _, found in each_with_keys(state))


def empty_containers(state: Any) -> list[Keys]:
    """Return the keys of containers that contain nothing."""
    return [keys for keys, found in each_with_keys(state) if isinstance(found, Mapping | list | tuple) and not found]


def replace_values(into: Any, saved: Any) -> list[Keys]:
    """Replace the values of ``into`` by those that ``saved`` has at the same keys. Tensors stay.

    Dicts and lists are changed in place. A container without tensors is replaced as a whole if it is of another kind or
    length than the saved one.

    Returns:
        The keys of values that stay, because ``saved`` has none or they cannot be replaced.
    """
    kept: list[Keys] = []
    _replace(into, saved, (), kept, {})
    return kept


def _replace(into: Any, saved: Any, keys: Keys, kept: list[Keys], seen: dict[int, object]) -> None:
    if id(into) in seen:
        return
    seen[id(into)] = into
    for key, value in [*into.items()] if isinstance(into, Mapping) else [*enumerate(into)]:
        if isinstance(value, torch.Tensor):
            continue
        new, here = _at(saved, key), (*keys, key)
        if _are_alike(value, new):
            _replace(value, new, here, kept, seen)
        elif _has_tensors(value):
            # Their names are missing in the file, which is refused, or they are filled by another path.
            kept += [(*here, *rest) for rest, found in each_with_keys(value) if _is_value(found)]
        elif new is _MISSING or _has_tensors(new) or not isinstance(into, MutableMapping | list):
            kept.append(here)
        else:
            into[key] = new


def _at(saved: Any, key: Any) -> Any:
    if isinstance(saved, Mapping):
        return saved.get(key, _MISSING)
    is_index = isinstance(saved, list | tuple) and type(key) is int and key < len(saved)
    return saved[key] if is_index else _MISSING


def _are_alike(value: Any, new: Any) -> bool:
    """Whether both are containers of a kind. An empty one asks for the whole other."""
    if isinstance(value, Mapping) and isinstance(new, Mapping):
        return bool(value)
    if isinstance(value, list) and isinstance(new, list):
        return len(value) == len(new) and bool(value)
    # A tuple cannot be changed in place, but what it contains can.
    return isinstance(value, tuple) and isinstance(new, tuple) and len(value) == len(new) and _has_tensors(value)


def _has_tensors(value: Any) -> bool:
    return next(each_tensor(value), None) is not None


def _is_value(found: object) -> bool:
    return not isinstance(found, torch.Tensor | Mapping | list | tuple)
