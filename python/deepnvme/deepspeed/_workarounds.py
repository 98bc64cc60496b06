"""Work around faults in DeepSpeed's Python code that break training from disk.

They have nothing to do with moving bytes. Each function takes one module right after its import, as in
`_monkeypatches`. None changes results: the losses of a run without these faults stay bit-identical.

*Prefetching parameters.* Near the end of the model DeepSpeed lists a parameter twice, for its forward and its backward
pass. Its swapper refuses the second ("already assigned swap buffer id"). One read serves both.

*`python -O`* removes every `assert`. DeepSpeed's swappers and file writers read, write and wait inside of `assert`, so
nothing would be transferred, silently. Their modules are run with asserts enabled.

*Resuming from a checkpoint* is in `_resume`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from deepnvme._utils.patches import Patches

_PARAMETERS = "deepspeed.runtime.swap_tensor.partitioned_param_swapper"
_ENGINE = "deepspeed.runtime.engine"
# Modules that do I/O inside of `assert`.
_ASSERTING = ("deepspeed.runtime.swap_tensor.", "deepspeed.io.")


def has_workaround(name: str) -> bool:
    """Whether a module of this name has a workaround."""
    return name in {_PARAMETERS, _ENGINE} or (not __debug__ and _does_io_in_asserts(name))


def apply(module: ModuleType, patches: Patches, *, is_new: bool) -> None:
    """Apply the workarounds of one module. `is_new` means that nobody has imported names from it yet."""
    name = module.__name__
    if not __debug__ and _does_io_in_asserts(name):
        _restore_asserts(module, is_new=is_new)
    if name == _PARAMETERS:
        swapper = module.AsyncPartitionedParameterSwapper
        patches.set_attribute(swapper, "swap_in", _without_duplicates(swapper.swap_in))
    if name == _ENGINE:
        engine = module.DeepSpeedEngine
        patches.set_attribute(engine, "load_checkpoint", _with_restored_state(engine.load_checkpoint))


def _does_io_in_asserts(name: str) -> bool:
    return name.startswith(_ASSERTING)


def _restore_asserts(module: ModuleType, *, is_new: bool) -> None:
    if not is_new:
        msg = (
            f"{module.__name__} was imported before deepnvme.deepspeed.install(): under `python -O` it skips all its "
            "reads and writes; call install() before `import deepspeed`, or run Python without -O"
        )
        raise RuntimeError(msg)
    path = module.__file__
    if path is not None:
        # Repeats all imports and definitions of the module. Nobody has seen the first ones.
        exec(compile(Path(path).read_bytes(), path, "exec", optimize=0), vars(module))  # noqa: S102 - the module itself


def _without_duplicates(original: Callable[..., Any]) -> Callable[..., Any]:
    def swap_in(self: Any, params: list[Any], async_op: bool = True, swap_in_buffers: list[Any] | None = None) -> Any:
        if swap_in_buffers is None:
            params = list({param.ds_id: param for param in params}.values())
        return original(self, params, async_op=async_op, swap_in_buffers=swap_in_buffers)

    return swap_in


def _with_restored_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(  # noqa: PLR0917 - the order is DeepSpeed's
        self: Any,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> Any:
        found = original(
            self,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        if found[0] is not None and load_optimizer_states and not load_module_only:
            # Imports torch.
            from . import _resume  # noqa: PLC0415

            _resume.restore_state(self, found[0])
        return found

    return load_checkpoint
