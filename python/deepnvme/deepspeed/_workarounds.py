"""Faults of DeepSpeed's own Python code that stand between a user and a training from disk, mended while installed.

Nothing of this is about how bytes move. Each function takes one module, right after its import, as those of `takeover`
do, and none changes what DeepSpeed computes where it works: the losses of a run that needs no mending stay the same,
bit by bit.

*Prefetching parameters.* Where the end of the model comes into sight, DeepSpeed lists a parameter twice, once for its
forward and once for its backward pass, and its swapper refuses the second ("already assigned swap buffer id").
Read once, it is there for both.

*`python -O`* drops every `assert`, and DeepSpeed's swappers and file writers do their reads, writes and waits inside
of `assert`: nothing would be read or written, and nobody told. Their modules are run with their asserts in place.

*Going on from a checkpoint* is in `resume`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from deepnvme._utils.patches import Patches

_PARAMETERS = "deepspeed.runtime.swap_tensor.partitioned_param_swapper"
_ENGINE = "deepspeed.runtime.engine"
# What moves bytes inside of `assert`.
_ASSERTING = ("deepspeed.runtime.swap_tensor.", "deepspeed.io.")


def wanted(name: str) -> bool:
    """Whether a module of this name has something to mend."""
    return name in {_PARAMETERS, _ENGINE} or (not __debug__ and _does_io_in_asserts(name))


def apply(module: ModuleType, patches: Patches, *, is_new: bool) -> None:
    """Mends one module; `is_new` says that nobody has taken anything from it yet."""
    name = module.__name__
    if not __debug__ and _does_io_in_asserts(name):
        _restore_asserts(module, is_new=is_new)
    if name == _PARAMETERS:
        swapper = module.AsyncPartitionedParameterSwapper
        patches.set_attribute(swapper, "swap_in", _each_once(swapper.swap_in))
    if name == _ENGINE:
        engine = module.DeepSpeedEngine
        patches.set_attribute(engine, "load_checkpoint", _restoring(engine.load_checkpoint))


def _does_io_in_asserts(name: str) -> bool:
    return name.startswith(_ASSERTING)


def _restore_asserts(module: ModuleType, *, is_new: bool) -> None:
    if not is_new:
        msg = (
            f"{module.__name__} was imported before deepnvme.deepspeed.install(): under `python -O` it drops all its "
            "reads and writes; call install() before `import deepspeed`, or run Python without -O"
        )
        raise RuntimeError(msg)
    path = module.__file__
    if path is not None:
        # With all that the module has imported and defined a second time; nobody else has seen the first.
        exec(compile(Path(path).read_bytes(), path, "exec", optimize=0), vars(module))  # noqa: S102 - the module itself


def _each_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def swap_in(self: Any, params: list[Any], async_op: bool = True, swap_in_buffers: list[Any] | None = None) -> Any:
        if swap_in_buffers is None:
            params = list({param.ds_id: param for param in params}.values())
        return original(self, params, async_op=async_op, swap_in_buffers=swap_in_buffers)

    return swap_in


def _restoring(original: Callable[..., Any]) -> Callable[..., Any]:
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
            # Torch is imported with it.
            from . import _resume  # noqa: PLC0415

            _resume.restore_state(self, found[0])
        return found

    return load_checkpoint
