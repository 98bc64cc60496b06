"""Restore optimizer state that DeepSpeed forgets when it resumes from a checkpoint with the optimizer on NVMe.

With `offload_optimizer` on `nvme`, `save_checkpoint` copies the swap files into the checkpoint and writes the rest of
the optimizer into the usual file. `load_checkpoint` copies the swap files back but never opens that file. So Adam
restarts at step 1, a new process forgets that it had moments, and small sub-groups, which are not swapped, keep their
old values. Training continues with different losses than without the interruption.

The checkpoint contains everything that is missing, and this module reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def restore_state(engine: Any, load_path: str) -> None:
    """Complete a `load_checkpoint` of `engine`, which has just read the file `load_path`."""
    zero = engine.optimizer
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None or engine.load_universal_checkpoint():
        return
    tag_folder = Path(load_path).parent
    path = engine._get_zero_ckpt_name(str(tag_folder.parent), tag_folder.name)  # noqa: SLF001 - only DeepSpeed knows
    saved = _read(engine, path)["optimizer_state_dict"]
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
    # Rebuilds the tensors that all ranks keep whole.
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
