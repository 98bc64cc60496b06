"""Changes to other libraries' objects that can be undone."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

_MISSING: Any = object()


class Patches:
    """A list of changes, undone last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set_attribute(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a class or module. Undoing deletes it if the owner did not have it itself."""
        before = vars(owner).get(name, _MISSING)
        if before is value:
            return
        setattr(owner, name, value)
        if before is _MISSING:
            self.on_undo(lambda: delattr(owner, name))
        else:
            self.on_undo(lambda: setattr(owner, name, before))

    def set_item(self, mapping: MutableMapping[str, Any], key: str, value: object) -> None:
        """Set an entry of a mapping."""
        before = mapping.get(key, _MISSING)
        if before is value:
            return
        mapping[key] = value
        if before is _MISSING:
            self.on_undo(lambda: mapping.pop(key, None))
        else:
            self.on_undo(lambda: mapping.update({key: before}))

    def on_undo(self, action: Callable[[], object]) -> None:
        """Call `action` when the changes are undone."""
        self._undo.append(action)

    def undo(self) -> None:
        """Undo all changes."""
        while self._undo:
            self._undo.pop()()
