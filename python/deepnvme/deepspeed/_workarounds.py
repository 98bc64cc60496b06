"""Work around faults in DeepSpeed's Python code that break training from disk.

They have nothing to do with moving bytes. Each function takes one module right after its import, as in
`_install`. None changes results: the losses of a run without these faults stay bit-identical.

*Prefetching parameters.* Near the end of the model DeepSpeed lists a parameter twice, for its forward and its backward
pass. Its swapper refuses the second ("already assigned swap buffer id"). One read serves both.

*`python -O`* removes every `assert`. DeepSpeed's swappers and file writers read, write and wait inside of `assert`, so
nothing would be transferred, silently. Their modules are run with asserts enabled.

*Resuming from a checkpoint.* With `offload_optimizer` on `nvme`, `save_checkpoint` copies the swap files into the
checkpoint and writes the rest of the optimizer into the usual file. `load_checkpoint` copies the swap files back but
never opens that file. So Adam restarts at step 1, a new process forgets that it had moments, and small sub-groups,
which are not swapped, keep their old values. Training continues with different losses than without the interruption.
The checkpoint contains everything that is missing, so it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepnvme._utils.patches import Patches

if TYPE_CHECKING:
    import torch

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
            restore_state(self, found[0])
        return found

    return load_checkpoint


def restore_state(engine: Any, load_path: str) -> None:
    """Complete a `load_checkpoint` of `engine`, which has just read the file `load_path`."""
    zero = engine.optimizer
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None or engine.load_universal_checkpoint():
        return
    tag_folder = Path(load_path).parent
    path = engine._get_zero_ckpt_name(str(tag_folder.parent), tag_folder.name)  # noqa: SLF001 - only DeepSpeed knows
    saved = _read(engine, path)["optimizer_state_dict"]
    # Frees the tensors that all ranks keep whole. The epilogue gathers only those that are not there.
    zero.checkpoint_event_prologue()
    zero.loss_scaler = saved["loss_scaler"]
    zero.dynamic_loss_scale = saved["dynamic_loss_scale"]
    zero.overflow = saved["overflow"]
    _restore_optimizer(zero, saved["optimizer_state_dict"])
    for sub_group, master in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(sub_group):  # noqa: SLF001
            numel = int(zero.fp16_partitioned_groups_flat_numel[sub_group])
            _register_swapped_state(swapper, master, zero.optimizer.state.get(master, {}), numel)
        else:
            master.data.copy_(saved["fp32_flat_groups"][sub_group].data)
            zero._reassign_or_swap_out_partitioned_parameters(sub_group)  # noqa: SLF001
    zero.checkpoint_event_epilogue()


def _read(engine: Any, path: str) -> Any:
    """Read a file that DeepSpeed does not open. Runs no code of the file unless the user has allowed it."""
    from deepnvme.integrations.deepspeed import DeepnvmeCheckpointEngine  # noqa: PLC0415 - it imports DeepSpeed

    ours = engine.checkpoint_engine
    if not isinstance(ours, DeepnvmeCheckpointEngine):
        ours = DeepnvmeCheckpointEngine()
    return ours.load(path, map_location="cpu")


def _restore_optimizer(zero: Any, saved: dict[str, Any]) -> None:
    # Between steps DeepSpeed keeps the param groups of its optimizer empty.
    zero._set_fp32_optimizer_param_groups()  # noqa: SLF001
    try:
        zero.optimizer.load_state_dict(saved)
    finally:
        zero._clear_fp32_optimizer_param_groups()  # noqa: SLF001


def _register_swapped_state(swapper: Any, master: torch.Tensor, state: dict[str, Any], numel: int) -> None:
    """Register the tensors of a sub-group's state that are in files. The swapper reads them at the next step."""
    import torch  # noqa: PLC0415

    info = swapper.swap_params_info[swapper.parameter_id(master)]
    # As in `purge_state`: forget what existed before the load.
    info.tensors = info.tensors[:1]
    info.has_state_tensors = False
    info.release_unswapped_gradients()
    swapped = [value for value in state.values() if torch.is_tensor(value) and value.dim() == 1 and value.numel() == 0]
    for value in swapped:
        # The swapper asks for the size. Untouched memory costs nothing.
        value.data = torch.empty(numel, dtype=master.dtype)
    swapper._update_param_state_info(info, master)  # noqa: SLF001
    info.release_memory()
