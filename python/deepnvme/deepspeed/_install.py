"""`install()` and `uninstall()`: an installed DeepSpeed on this engine, and back."""

from __future__ import annotations

import multiprocessing.spawn
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepnvme._utils.import_hooks import ImportHook
from deepnvme._utils.patches import Patches

from . import _monkeypatches, _workarounds
from ._builders import BUILDERS


class _Installation:
    """All that `install` has changed."""

    def __init__(self) -> None:
        self._patches = Patches()
        hook = ImportHook(_is_wanted, self._change_new)
        sys.meta_path.insert(0, hook)
        self._patches.on_undo(lambda: sys.meta_path.remove(hook))
        _install_in_children(install, self._patches)
        try:
            self._change_loaded(_deepspeed_modules())
        except BaseException:
            self.undo()
            raise

    def _change_loaded(self, modules: list[ModuleType]) -> None:
        for module in modules:
            if _is_wanted(module.__name__):
                self._change(module, is_new=False)
        for module in modules:
            _monkeypatches.rebind(module, self._patches)

    def _change_new(self, module: ModuleType) -> None:
        self._change(module, is_new=True)

    def _change(self, module: ModuleType, *, is_new: bool) -> None:
        if _monkeypatches.wanted(module.__name__):
            _monkeypatches.change(module, self._patches)
        if _workarounds.wanted(module.__name__):
            _workarounds.apply(module, self._patches, is_new=is_new)

    def undo(self) -> None:
        self._patches.undo()
        _release_names()


class _Switch:
    """Whether it is installed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installation: _Installation | None = None

    def on(self) -> None:
        with self._lock:
            if self._installation is None:
                self._installation = _Installation()

    def off(self) -> None:
        with self._lock:
            installation, self._installation = self._installation, None
            if installation is not None:
                installation.undo()


_switch = _Switch()


def install() -> None:
    """Makes DeepSpeed use this engine for `async_io`, `gds`, `pin_memory` and `utils`, here and in child processes.

    Call it before or after `import deepspeed`; before is better, since a script that has itself imported
    `UtilsBuilder` from DeepSpeed on a machine without a GPU keeps the one it has. Nothing is compiled from then on for
    these ops, and they count as installed and compatible; `gds` is compatible where torch reaches an NVIDIA GPU.
    Processes started by `multiprocessing` inherit the installation; any other program calls `install()` itself.

    Three faults of DeepSpeed's own Python code are mended as long as it is installed: `mends` names them.

    A second call changes nothing, and one `uninstall` undoes any number of calls. Ops and handles that DeepSpeed
    has loaded already stay what they are, before and after.

    >>> import deepnvme.deepspeed
    >>> deepnvme.deepspeed.install()
    >>> import deepspeed
    """
    _switch.on()


def uninstall() -> None:
    """Gives DeepSpeed its own ops back. Does nothing where they are not replaced."""
    _switch.off()


def _is_wanted(name: str) -> bool:
    return _monkeypatches.wanted(name) or _workarounds.wanted(name)


def _deepspeed_modules() -> list[ModuleType]:
    # Programs put other things than modules there, too.
    modules: list[tuple[str, object]] = list(sys.modules.items())
    return [module for name, module in modules if isinstance(module, ModuleType) and _monkeypatches.belongs(name)]


def _release_names() -> None:
    # Modules that were imported meanwhile have bound our builders where the accelerator has none of its own.
    for module in _deepspeed_modules():
        for class_name, ours in BUILDERS.items():
            if vars(module).get(class_name) is ours:
                package = sys.modules.get("deepspeed.accelerator") or sys.modules["accelerator"]
                setattr(module, class_name, package.get_accelerator().get_op_builder(class_name))


# Multiprocessing ignores entries of its preparation data that it does not know.
_KEY = "deepnvme.deepspeed"


class _CallOnUnpickling:
    """Unpickled in the child before anything else of the program runs there."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self._function, ()


def _install_in_children(install: Callable[[], None], patches: Patches) -> None:
    """Makes every child process that is started from now on call `install` (a module-level function) first."""
    module: Any = multiprocessing.spawn
    original: Callable[[str], dict[str, Any]] = module.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), _KEY: _CallOnUnpickling(install)}

    patches.set_attribute(module, "get_preparation_data", get_preparation_data)
