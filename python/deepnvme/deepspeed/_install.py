"""Make an installed DeepSpeed use our ops: builders that load them, `install()`, and `uninstall()`.

The `load()` of a builder imports a module instead of compiling. `_change_module` and `_rebind` take one module of
DeepSpeed, and do nothing if it needs no change. So it does not matter whether the module was imported long ago or just
now.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing.spawn
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.patches import ImportHook, Patches
from deepnvme._utils.public import public_in

from . import _workarounds

# In a wheel the builders are in `deepspeed.ops.op_builder`; in a source tree also in `op_builder`.
_OP_BUILDERS = re.compile(r"(deepspeed\.ops\.)?op_builder(\..+)?")
_ACCELERATORS = re.compile(r"(deepspeed\.)?accelerator\.\w+_accelerator")
_CHECKPOINT_ENGINES = "deepspeed.runtime.checkpoint_engine.utils"
_OTHERS = frozenset({"deepspeed.ops", "deepspeed.git_version_info", _CHECKPOINT_ENGINES})


class _Builder:
    """The interface of DeepSpeed's op builders. Nothing is built: the op is a module of this package."""

    BUILD_VAR: ClassVar[str]
    NAME: ClassVar[str]

    def __init__(self) -> None:
        self.name = self.NAME

    def absolute_name(self) -> str:
        """Return the name of the module that `load` returns."""
        return f"{__package__}.{self.NAME}"

    def is_compatible(self, verbose: bool = False) -> bool:  # noqa: ARG002 - DeepSpeed's signature
        """Whether the op works on this machine."""
        return sys.platform == "linux"

    def load(self, verbose: bool = False) -> ModuleType:  # noqa: ARG002 - DeepSpeed's signature
        """Import the op and return its module."""
        return importlib.import_module(self.absolute_name())


@public_in("deepnvme.deepspeed")
class AsyncIOBuilder(_Builder):
    """A builder that loads `aio_handle`, `aio_read`, `aio_write` and `deepspeed_memcpy`. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import AsyncIOBuilder
        >>> AsyncIOBuilder().load().__name__
        'deepnvme.deepspeed.async_io'
    """

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"


@public_in("deepnvme.deepspeed")
class PinMemoryBuilder(_Builder):
    """A builder that loads `pin_handle`. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import PinMemoryBuilder
        >>> PinMemoryBuilder().load().__name__
        'deepnvme.deepspeed.pin_memory'
    """

    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    NAME = "pin_memory"


@public_in("deepnvme.deepspeed")
class UtilsBuilder(_Builder):
    """A builder that loads `cast_to_byte_tensor`. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import UtilsBuilder
        >>> UtilsBuilder().load().__name__
        'deepnvme.deepspeed.utils'
    """

    BUILD_VAR = "DS_BUILD_UTILS"
    NAME = "utils"


@public_in("deepnvme.deepspeed")
class GDSBuilder(_Builder):
    """A builder that loads `gds_handle`, which also works without a GPU, for CPU tensors. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import GDSBuilder
        >>> GDSBuilder().load().__name__
        'deepnvme.deepspeed.gds'
    """

    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether torch reaches an NVIDIA GPU. Imports torch."""
        if not super().is_compatible(verbose) or importlib.util.find_spec("torch") is None:
            return False
        torch = importlib.import_module("torch")
        return torch.version.hip is None and bool(torch.cuda.is_available())


BUILDERS: dict[str, type[_Builder]] = {
    builder.__name__: builder for builder in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder, UtilsBuilder)
}
_BY_OP_NAME = {builder.NAME: builder for builder in BUILDERS.values()}


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
            _rebind(module, self._patches)

    def _change_new(self, module: ModuleType) -> None:
        self._change(module, is_new=True)

    def _change(self, module: ModuleType, *, is_new: bool) -> None:
        if _is_patched(module.__name__):
            _change_module(module, self._patches)
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
    return _is_patched(name) or _workarounds.has_workaround(name)


def _deepspeed_modules() -> list[ModuleType]:
    # `sys.modules` may contain objects that are not modules.
    modules: list[tuple[str, object]] = list(sys.modules.items())
    return [module for name, module in modules if isinstance(module, ModuleType) and _is_of_deepspeed(name)]


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
    spawn: Any = multiprocessing.spawn
    plain_data: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**plain_data(name), _KEY: _CallOnUnpickling(install)}

    patches.set_attribute(spawn, "get_preparation_data", get_preparation_data)


def _is_patched(name: str) -> bool:
    """Whether a module of this name is changed right after its import."""
    return bool(_OP_BUILDERS.fullmatch(name) or _ACCELERATORS.fullmatch(name)) or name in _OTHERS


def _is_of_deepspeed(name: str) -> bool:
    """Whether a module of this name belongs to DeepSpeed and may contain names of builders."""
    return name.partition(".")[0] in {"accelerator", "deepspeed", "op_builder"}


def _change_module(module: ModuleType, patches: Patches) -> None:
    """Make one module of DeepSpeed use our ops."""
    name = module.__name__
    if _OP_BUILDERS.fullmatch(name):
        _change_builders(module, patches)
    if _ACCELERATORS.fullmatch(name):
        _change_accelerator(module, patches)
    if name.endswith("op_builder.all_ops"):
        _add_to_all_ops(module, patches)
    if name == "deepspeed.git_version_info":
        for op_name in _BY_OP_NAME:
            patches.set_item(module.installed_ops, op_name, True)
    if name == "deepspeed.ops":
        _change_compatible_ops(module, patches)
    if name == _CHECKPOINT_ENGINES:
        _change_checkpoint_engines(module, patches)


def _rebind(module: ModuleType, patches: Patches) -> None:
    """Replace builder classes that a module imported from an accelerator before ``install``."""
    for class_name, ours in BUILDERS.items():
        taken = vars(module).get(class_name)
        if isinstance(taken, type) and getattr(taken, "NAME", None) != ours.NAME:
            patches.set_attribute(module, class_name, ours)


def _change_builders(module: ModuleType, patches: Patches) -> None:
    for value in list(vars(module).values()):
        if not isinstance(value, type) or value.__module__ != module.__name__:
            continue
        ours = _BY_OP_NAME.get(vars(value).get("NAME", ""))
        if ours is None:
            continue
        # Plain functions become methods of DeepSpeed's class. They ignore `self`.
        patches.set_attribute(value, "load", _load_method(ours.NAME))
        patches.set_attribute(value, "is_compatible", _is_compatible_method(ours.NAME))


def _load_method(op_name: str) -> Any:
    def load(_self: object, verbose: bool = False) -> ModuleType:
        return _BY_OP_NAME[op_name]().load(verbose)

    return load


def _is_compatible_method(op_name: str) -> Any:
    # Evaluated at each call: the answer for `gds` initialises the GPU driver, which a process that forks must not do.
    def is_compatible(_self: object, verbose: bool = False) -> bool:
        return _BY_OP_NAME[op_name]().is_compatible(verbose)

    return is_compatible


def _change_accelerator(module: ModuleType, patches: Patches) -> None:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__ and "get_op_builder" in vars(value):
            patches.set_attribute(value, "get_op_builder", _with_our_builders(vars(value)["get_op_builder"]))


def _with_our_builders(original: Any) -> Any:
    def get_op_builder(self: object, class_name: str) -> Any:
        found = original(self, class_name)
        ours = BUILDERS.get(class_name)
        if ours is None or getattr(found, "NAME", None) == ours.NAME:
            return found
        return ours

    return get_op_builder


def _add_to_all_ops(module: ModuleType, patches: Patches) -> None:
    for op_name, builder in _BY_OP_NAME.items():
        if op_name not in module.ALL_OPS:
            patches.set_item(module.ALL_OPS, op_name, builder())


def _change_compatible_ops(module: ModuleType, patches: Patches) -> None:
    name = "__compatible_ops__"
    answers = vars(module).get(name)
    if answers is None:
        # Newer versions compute it on first access, with our builders. `uninstall` must remove that result.
        patches.on_undo(lambda: vars(module).pop(name, None))
        return
    # `deepspeed.ops` has asked all builders at its import, even those that initialise the GPU driver.
    for op_name, builder in _BY_OP_NAME.items():
        patches.set_item(answers, op_name, builder().is_compatible())


def _change_checkpoint_engines(module: ModuleType, patches: Patches) -> None:
    # The module calls these if a config has a checkpoint writer.
    replacements = {
        "FastCheckpointEngine": _lazy_engine("WriterCheckpointEngine"),
        "DecoupledCheckpointEngine": _lazy_engine("DecoupledCheckpointEngine"),
        # Splits files between writers. Ours do not split, and need no variables of the launcher.
        "create_data_parallel_writer_config": lambda **_: None,
    }
    for name, ours in replacements.items():
        if name in vars(module):
            patches.set_attribute(module, name, ours)


def _lazy_engine(class_name: str) -> Any:
    def make(*arguments: Any) -> Any:
        # Imports torch and most of DeepSpeed.
        from deepnvme.integrations import _deepspeed_writers  # noqa: PLC0415

        return getattr(_deepspeed_writers, class_name)(*arguments)

    return make
