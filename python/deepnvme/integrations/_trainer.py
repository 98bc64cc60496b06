"""A Trainer of transformers whose training state is on disk: its steps, its checkpoints, and their end.

The Trainer's own methods read all weights, and all state of the optimizer, into memory. The object gets others.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.load import load
from deepnvme._checkpoint.save import save_without_warnings
from deepnvme._offload import offload as offload_model
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WEIGHTS, STATE, SCHEDULER = "model.safetensors", "optimizer.safetensors", "scheduler.pt"
_SAVE_STATE, _LOAD_STATE = "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"
_LOAD_WEIGHTS, _LOAD_BEST = "_load_from_checkpoint", "_load_best_model"
_METHODS = (_SAVE_STATE, _LOAD_STATE, _LOAD_WEIGHTS, _LOAD_BEST)


def offload_trainer(
    trainer: Any,
    *,
    memory: str | int,
    swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    in_backward: bool,
    checksums: bool,
    settings: dict[str, Any],
) -> Any:
    """Offload the model of a Trainer, give it the optimizer, and let it save both within the bound."""
    _check(trainer, in_backward=in_backward)
    model, arguments = trainer.model, trainer.args
    made_by, options = trainer.get_optimizer_cls_and_kwargs(arguments, model)
    decaying = frozenset(trainer.get_decay_parameter_names(model))
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in named if name in decaying], "weight_decay": arguments.weight_decay},
        {"params": [param for name, param in named if name not in decaying], "weight_decay": 0.0},
    ]
    _, optimizer = offload_model(
        model,
        made_by,
        memory=memory,
        swap_dir=swap_dir,
        params=[group for group in groups if group["params"]],
        in_backward=in_backward,
        checksums=checksums,
        **{**options, **settings},
    )
    trainer.optimizer = optimizer
    checkpoints = _Checkpoints(trainer, model, optimizer)
    checkpoints.begin()
    optimizer._detach_on_close(checkpoints.end)  # noqa: SLF001
    return optimizer


def _check(trainer: Any, *, in_backward: bool) -> None:
    """Raise if this Trainer cannot train an offloaded model."""
    missing = [name for name in _METHODS if not callable(getattr(trainer, name, None))]
    if missing or not hasattr(trainer, "args"):
        msg = f"offload takes a transformers.Trainer, not {type(trainer).__name__}"
        raise TypeError(msg)
    arguments = trainer.args
    if trainer.optimizer is not None:
        raise UnsupportedError(
            "this Trainer has an optimizer already; call offload before train(), and omit optimizers="
        )
    if arguments.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise UnsupportedError(
            "offload trains in one process; with FSDP pass optimizer_cls_and_kwargs=(deepnvme.optim.AdamW, "
            '{"lr": ..., "swap_dir": ..., "memory": ...}) to the Trainer: each process keeps its state on disk'
        )
    if in_backward and (arguments.max_grad_norm or arguments.gradient_accumulation_steps > 1):
        raise UnsupportedError(
            "in_backward=True updates a block before all gradients exist, so they can be neither clipped nor "
            "accumulated; set max_grad_norm=0 and gradient_accumulation_steps=1, or omit in_backward"
        )


class _Checkpoints:
    """Saves and loads of a Trainer that keep the bound."""

    def __init__(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self._trainer, self._model, self._optimizer = trainer, model, optimizer
        self._replaced: list[tuple[Any, str]] = []

    def begin(self) -> None:
        """Replace the methods."""
        for name, ours in (
            (_SAVE_STATE, self._save_state),
            (_LOAD_STATE, self._load_state),
            (_LOAD_WEIGHTS, self._load_weights),
            (_LOAD_BEST, self._load_best),
        ):
            self._replace(self._trainer, name, ours)
        if hasattr(self._model, "config") and not hasattr(self._model, "peft_config"):
            theirs = self._model.save_pretrained
            self._replace(self._model, "save_pretrained", functools.partial(self._save_weights, theirs))

    def end(self) -> None:
        """Let the Trainer have its own methods again."""
        while self._replaced:
            thing, name = self._replaced[-1]
            vars(thing).pop(name, None)
            self._replaced.pop()

    def _replace(self, thing: Any, name: str, ours: Callable[..., Any]) -> None:
        self._replaced.append((thing, name))
        vars(thing)[name] = ours

    def _save_weights(
        self,
        theirs: Callable[..., Any],
        save_directory: str | os.PathLike[str],
        *arguments: Any,
        state_dict: Any = None,
        is_main_process: bool = True,
        **options: Any,
    ) -> Any:
        """Write the weights in pieces, where ``save_pretrained`` would read all of them."""
        if arguments or state_dict is not None or options:
            return theirs(save_directory, *arguments, state_dict=state_dict, is_main_process=is_main_process, **options)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._model.config.save_pretrained(folder)
        if getattr(self._model, "generation_config", None) is not None and self._model.can_generate():
            self._model.generation_config.save_pretrained(folder)
        return self._model.offloading.save(folder / WEIGHTS, progress=False)

    def _load_weights(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if model is not None and model is not self._model:
            raise UnsupportedError("this Trainer trains an offloaded model, and can load no other one")
        path = Path(resume_from_checkpoint) / WEIGHTS
        state = load(path, lazy=True, progress=False)
        missing, unexpected = self._model.offloading.load_state_dict(state, strict=False)
        # A file has a tied weight under one of its names.
        lacking = sorted(set(missing) - set(getattr(self._model, "all_tied_weights_keys", ())))
        if lacking or unexpected:
            raise UnsupportedError(f"{path} is of another model: missing {lacking}, unexpected {unexpected}")

    def _load_best(self) -> None:
        self._load_weights(self._trainer.state.best_model_checkpoint)

    def _save_state(self, output_dir: str) -> None:
        self._optimizer.save_state(Path(output_dir) / STATE)
        save_without_warnings(self._trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / STATE).exists():
            self._optimizer.load_state(folder / STATE)
        else:
            # Of a Trainer without offload.
            self._optimizer.load_state_dict(load(folder / "optimizer.pt", progress=False))
        self._trainer.lr_scheduler.load_state_dict(load(folder / SCHEDULER, progress=False))
