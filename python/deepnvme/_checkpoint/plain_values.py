"""Non-tensor values of a state, such as the number of a step, and parts of a state that have no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from deepnvme._checkpoint.nested_states import Keys, each_tensor, each_with_keys, expression, name_of, names_above
from deepnvme.errors import InvalidArgumentError

_MISSING = object()


def has_values(state: Any) -> bool:
    """Whether a state contains anything but tensors, and containers of them."""
    return any(not isinstance(found, torch.Tensor | Mapping | list | tuple) for _, found in each_with_keys(state))


def empty_containers(state: Any) -> list[Keys]:
    """Return the keys of containers that contain nothing."""
    return [keys for keys, found in each_with_keys(state) if isinstance(found, Mapping | list | tuple) and not found]


class Replacements:
    """The values of ``into`` that differ from those that ``saved`` has at the same keys. Tensors stay.

    Raises:
        InvalidArgumentError: a container occurs twice in ``into``, and the file has different values for it.
    """

    def __init__(self, into: Any, saved: Any) -> None:
        self.lacking: list[Keys] = []
        """Values that ``saved`` has none for."""
        self.fixed: list[Keys] = []
        """Values in containers that cannot change, such as a tuple with tensors."""
        # By container and key: the container, the key, the new value, and the keys that lead there.
        self._new: dict[tuple[int, Any], tuple[Any, Any, Any, Keys]] = {}
        # Pairs of containers that were compared. They are kept, so that no id is used again.
        self._seen: dict[tuple[int, int], tuple[object, object]] = {}
        self._compare(into, saved, ())

    def apply(self) -> None:
        """Replace the values. Dicts and lists are changed in place."""
        for container, key, value, _ in self._new.values():
            container[key] = value

    def _compare(self, into: Any, saved: Any, keys: Keys) -> None:
        if (id(into), id(saved)) in self._seen:
            return
        self._seen[id(into), id(saved)] = into, saved
        for key, value in [*into.items()] if isinstance(into, Mapping) else [*enumerate(into)]:
            if isinstance(value, torch.Tensor):
                continue
            new, here = _at(saved, key), (*keys, key)
            if _is_container(value) and (_has_tensors(value) or _are_alike(value, new)):
                self._compare(value, new, here)
            elif new is _MISSING or _has_tensors(new):
                self.lacking.append(here)
            elif isinstance(into, MutableMapping | list):
                self._note(into, key, new, here)
            elif not _are_equal(value, new):
                self.fixed.append(here)

    def _note(self, into: Any, key: Any, new: Any, here: Keys) -> None:
        known = self._new.setdefault((id(into), key), (into, key, new, here))
        if not _are_equal(known[2], new):
            msg = f"into{expression(known[3])} and into{expression(here)} are in one container, and the file has"
            raise InvalidArgumentError(f"{msg} different values for them; give each a container of its own")


def refuse_lost(checkpoint: str, empty: list[Keys], lacking: list[Keys], names: Iterable[str]) -> None:
    """Refuse parts of ``into`` without tensors, if the checkpoint has tensors there: they would be lost.

    Args:
        checkpoint: its path, for the message.
        empty: empty containers.
        lacking: values that the checkpoint has none for.
        names: the names of its tensors.
    """
    words = {name_of(keys): (keys, "is no tensor") for keys in lacking}
    words |= {name_of(keys): (keys, "is empty") for keys in empty}
    for name in names:
        found = next((words[part] for part in ("", *names_above(name)) if part in words), None)
        if found is None:
            continue
        keys, word = found
        msg = (
            f"{checkpoint}: into{expression(keys)} {word}, and the checkpoint has tensors there, such as {name}, which "
            "would be lost; load without into, fill it first (an optimizer's state exists from its first step on, or "
            "from get_state_dict of torch.distributed.checkpoint.state_dict), or leave the key out"
        )
        raise InvalidArgumentError(msg)


def _at(saved: Any, key: Any) -> Any:
    if isinstance(saved, Mapping):
        return saved.get(key, _MISSING)
    is_index = isinstance(saved, list | tuple) and type(key) is int and key < len(saved)
    return saved[key] if is_index else _MISSING


def _are_alike(value: Any, new: Any) -> bool:
    """Whether both are dicts, or lists of one length. An empty container asks for the whole other."""
    if isinstance(value, Mapping) and isinstance(new, Mapping):
        return bool(value)
    return isinstance(value, list) and isinstance(new, list) and len(value) == len(new) > 0


def _are_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _has_tensors(value: Any) -> bool:
    return next(each_tensor(value), None) is not None


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)
