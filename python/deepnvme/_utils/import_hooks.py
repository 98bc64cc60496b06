"""Calls a function after a module is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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
