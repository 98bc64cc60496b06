"""Changes to other libraries: objects that are replaced until it is undone, even in modules that are imported later."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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


class ImportHook(MetaPathFinder):
    """Leaves finding to the other finders, and calls `imported` after a wanted module has run."""

    def __init__(self, wanted: Callable[[str], bool], imported: Callable[[ModuleType], None]) -> None:
        self._wanted = wanted
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec, with a loader that calls back."""
        if not self._wanted(fullname):
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Loader) -> None:
        # Only on this loader object, and only for this import. Its class stays unchanged.
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            self._imported(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
