"""Lets the processes that `multiprocessing` starts (spawn, forkserver) inherit `install()`."""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Callable
from typing import Any

from deepnvme._utils.patches import Patches

# Multiprocessing ignores entries of its preparation data that it does not know.
_KEY = "deepnvme.deepspeed"


class _CallOnUnpickling:
    """Unpickled in the child before anything else of the program runs there."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self._function, ()


def inherit(install: Callable[[], None], patches: Patches) -> None:
    """Makes every child process that is started from now on call `install` (a module-level function) first."""
    module: Any = multiprocessing.spawn
    original: Callable[[str], dict[str, Any]] = module.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), _KEY: _CallOnUnpickling(install)}

    patches.set_attribute(module, "get_preparation_data", get_preparation_data)
