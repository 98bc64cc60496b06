"""Maps the string keys of torch's planners back to the state's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OwnKeys:
    """Finds the places of a nested state by the paths of torch's planners.

    Such a path has each key as text. A plain value of key ``0`` would be set under ``"0"``, and the state would keep
    its old value under ``0``.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state
        # The keys of each dict that are not strings, by their strings: a search for each value would be quadratic.
        # The dict itself is held, since a later dict could get the id of one that is gone.
        self._keys: dict[int, tuple[Mapping[Any, Any], dict[str, Any]]] = {}

    def path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the path with the keys that the state has."""
        found: list[Any] = []
        container: Any = self._state
        for part in path:
            key = self._key(container, part) if isinstance(container, Mapping) else part
            found.append(key)
            try:
                container = container[key]
            except (KeyError, IndexError, TypeError):
                container = None
        return tuple(found)

    def set(self, path: tuple[Any, ...], value: Any) -> None:
        """Set a value at a path with the state's own keys."""
        element(self._state, path[:-1])[path[-1]] = value

    def _key(self, container: Mapping[Any, Any], text: Any) -> Any:
        if text in container:
            return text
        if (known := self._keys.get(id(container))) is None:
            keys = {str(key): key for key in container if not isinstance(key, str)}
            known = self._keys[id(container)] = container, keys
        return known[1].get(text, text)


def element(state: Any, path: tuple[Any, ...]) -> Any:
    """Return what is at a path."""
    for part in path:
        state = state[part]
    return state
