"""`install()` and `uninstall()`: make an installed DeepSpeed use deepnvme, and undo it."""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.patches import ImportHook, Patches
from deepnvme._utils.public import public_in

from . import _monkeypatches, _workarounds
from ._builders import BUILDERS


class _Installation:
    """Everything that `install` has changed."""

    def __init__(self) -> None:
        self._patches = Patches()
        hook = ImportHook(_is_changed_on_import, self._change_new)
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
            if _is_changed_on_import(module.__name__):
                self._change(module, is_new=False)
        for module in modules:
            _monkeypatches.rebind(module, self._patches)

    def _change_new(self, module: ModuleType) -> None:
        self._change(module, is_new=True)

    def _change(self, module: ModuleType, *, is_new: bool) -> None:
        if _monkeypatches.is_changed_on_import(module.__name__):
            _monkeypatches.change(module, self._patches)
        if _workarounds.has_workaround(module.__name__):
            _workarounds.apply(module, self._patches, is_new=is_new)

    def undo(self) -> None:
        self._patches.undo()
        _release_names()


class _Switch:
    """Whether it is installed."""

    def __init__(self) -> None:
        self._lock = make_lock()
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


@public_in("deepnvme.deepspeed")
def install() -> None:
    """Make DeepSpeed use deepnvme for `async_io`, `gds`, `pin_memory` and `utils`, in this process and its children.

    Call it before `import deepspeed` if possible. A later call also works, except for a script on a machine without a
    GPU that has already imported `UtilsBuilder` from DeepSpeed. From then on nothing is compiled for these ops, and
    they count as installed and compatible; `gds` is compatible if torch reaches an NVIDIA GPU. Processes started by
    `multiprocessing` inherit the installation. Other programs call `install()` themselves.

    While installed, it also works around three faults in DeepSpeed's Python code; the page "Train with DeepSpeed" lists
    them.

    Repeated calls change nothing, and one `uninstall` undoes all of them. Ops and handles that DeepSpeed has already
    loaded are not replaced.

    Example:
        >>> import deepnvme.deepspeed
        >>> deepnvme.deepspeed.install()
        >>> import deepspeed
    """
    _switch.on()


@public_in("deepnvme.deepspeed")
def uninstall() -> None:
    """Restore DeepSpeed's own ops. Does nothing if they are not replaced.

    Example:
        >>> deepnvme.deepspeed.uninstall()
    """
    _switch.off()


def _is_changed_on_import(name: str) -> bool:
    return _monkeypatches.is_changed_on_import(name) or _workarounds.has_workaround(name)


def _deepspeed_modules() -> list[ModuleType]:
    # `sys.modules` may contain objects that are not modules.
    modules: list[tuple[str, object]] = list(sys.modules.items())
    return [
        module for name, module in modules if isinstance(module, ModuleType) and _monkeypatches.is_of_deepspeed(name)
    ]


def _release_names() -> None:
    # Modules imported in the meantime have bound our builders if the accelerator has none of its own.
    for module in _deepspeed_modules():
        for class_name, ours in BUILDERS.items():
            if vars(module).get(class_name) is ours:
                package = sys.modules.get("deepspeed.accelerator") or sys.modules["accelerator"]
                setattr(module, class_name, package.get_accelerator().get_op_builder(class_name))


# `multiprocessing` ignores unknown entries of its preparation data.
_KEY = "deepnvme.deepspeed"


class _CallOnUnpickling:
    """Unpickled in the child before any other code of the program runs there."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return self._function, ()


def _install_in_children(install: Callable[[], None], patches: Patches) -> None:
    """Make every child process started from now on call `install`, a module-level function, first."""
    module: Any = multiprocessing.spawn
    original: Callable[[str], dict[str, Any]] = module.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), _KEY: _CallOnUnpickling(install)}

    patches.set_attribute(module, "get_preparation_data", get_preparation_data)
