"""Hugging Face transformers: ``save_pretrained``, ``from_pretrained``, the checkpoints of a Trainer, and its training.

The files have their usual names and formats: safetensors, with shards and an index for large models, and torch archives
for optimizer, scheduler, scaler and random-number generators. They are durable, replaced atomically, and have
checksums.

Example::

    import deepnvme.integrations.transformers

    with deepnvme.integrations.transformers.enabled():
        model = AutoModelForCausalLM.from_pretrained(folder)
        Trainer(model=model, args=arguments, train_dataset=dataset).train(resume_from_checkpoint=True)
        model.save_pretrained("trained")

A Trainer trains a model that exceeds memory after one more line::

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    deepnvme.integrations.transformers.offload(trainer, memory="6GB", swap_dir="/mnt/nvme")
    trainer.train()
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.patches import ImportHook, Patches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["disable", "enable", "enabled", "offload"]


def __dir__() -> list[str]:
    return sorted(__all__)


_MODULES = ("transformers.modeling_utils", "transformers.trainer", "transformers.trainer_utils")


def enable() -> None:
    """Make transformers write and read weights through deepnvme in this process, even if it is imported already.

    Repeated calls do nothing. One call of ``disable`` undoes them all. This raises no errors of its own: saves and
    loads raise :class:`deepnvme.Error` later, if the disk fails or a file is damaged.

    Example:
        >>> import transformers
        >>> import deepnvme.integrations.transformers
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))
        >>> deepnvme.integrations.transformers.enable()
        >>> model.save_pretrained("trained")
        >>> deepnvme.integrations.transformers.disable()
    """
    with _lock:
        if _installed:
            return
        patches = Patches()
        hook = ImportHook(_MODULES.__contains__, lambda module: _patch(module, patches))
        sys.meta_path.insert(0, hook)
        patches.on_undo(lambda: sys.meta_path.remove(hook))
        for name in _MODULES:
            if name in sys.modules:
                _patch(sys.modules[name], patches)
        _installed.append(patches)


def disable() -> None:
    """Restore transformers' own functions. Does nothing if they are not replaced.

    Example:
        >>> import deepnvme.integrations.transformers
        >>> deepnvme.integrations.transformers.enable()
        >>> deepnvme.integrations.transformers.disable()
    """
    with _lock:
        while _installed:
            _installed.pop().undo()


@contextmanager
def enabled() -> Iterator[None]:
    """Make transformers write and read weights through deepnvme inside a ``with`` block.

    Yields:
        Nothing.

    Example:
        >>> import transformers
        >>> import deepnvme.integrations.transformers
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))
        >>> with deepnvme.integrations.transformers.enabled():
        ...     model.save_pretrained("trained")
    """
    was_enabled = bool(_installed)
    enable()
    try:
        yield
    finally:
        if not was_enabled:
            disable()


def offload(
    trainer: Any,
    *,
    memory: str | int,
    swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    in_backward: bool = False,
    checksums: bool = False,
    **settings: Any,
) -> Any:
    """Let a Trainer train a model that exceeds memory: :func:`deepnvme.offload` with the Trainer's own settings.

    The optimizer is that of ``TrainingArguments`` (``optim="adamw_torch"``, ``"sgd"`` or ``"adagrad"``), with its
    learning rate, betas and weight decay. Checkpoints have the usual weights, and the optimizer's state in
    ``optimizer.safetensors``. Neither is read into memory as a whole. ``resume_from_checkpoint=`` and
    ``load_best_model_at_end`` work. A checkpoint of a Trainer without ``offload`` can be resumed too, and needs memory
    for its state.

    Args:
        trainer: a ``transformers.Trainer`` with its model in CPU memory, before ``train()``.
        memory: bytes for weights, gradients, state and activations together, such as ``"6GB"``.
        swap_dir: as in :func:`deepnvme.offload`.
        in_backward: as in :func:`deepnvme.offload`. It needs ``max_grad_norm=0``. Default False.
        checksums: as in :func:`deepnvme.offload`. Default False.
        **settings: more arguments of the optimizer, such as ``moments="8bit"``.

    Returns:
        The optimizer, with ``plan``. ``optimizer.close()`` ends it: the weights are back in memory, and the Trainer has
        its own methods again.

    Raises:
        MemoryError: ``memory`` is too little; the message states how much is enough.
        OSError: the disk is full or fails.
        TypeError: ``trainer`` is no Trainer.
        deepnvme.errors.UnsupportedError: the Trainer has an optimizer already, or trains in several processes; or its
            optimizer or model cannot be offloaded. The message states why.

    Example:
        >>> import transformers
        >>> import deepnvme.integrations.transformers
        >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
        >>> tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        >>> arguments = transformers.TrainingArguments("run", max_steps=2, report_to=[], disable_tqdm=True)
        >>> trainer = transformers.Trainer(model=model, args=arguments, train_dataset=tokens)
        >>> optimizer = deepnvme.integrations.transformers.offload(trainer, memory="1MB", swap_dir=".")
        >>> trainer.remove_callback(transformers.PrinterCallback)
        >>> result = trainer.train()
        >>> optimizer.plan.is_measured
        True
        >>> optimizer.close()
    """
    from deepnvme.integrations._trainer import offload_trainer  # noqa: PLC0415

    return offload_trainer(
        trainer, memory=memory, swap_dir=swap_dir, in_backward=in_backward, checksums=checksums, settings=settings
    )


_lock = make_lock()
_installed: list[Patches] = []


def _patch(module: ModuleType, patches: Patches) -> None:
    """Replace functions of safetensors and torch that a module of transformers calls."""
    from deepnvme.integrations._safetensors import TensorFile  # noqa: PLC0415

    replacements = {"safe_save_file": _save_tensors, "safe_load_file": _load_tensors, "safe_open": TensorFile}
    if module.__name__ == "transformers.trainer":
        replacements |= _patched_modules(module)
    for name, ours in replacements.items():
        if name in vars(module):
            patches.set_attribute(module, name, ours)


def _patched_modules(trainer: ModuleType) -> dict[str, Any]:
    """Wrap the modules that the Trainer saves and loads with. Other callers use the modules themselves."""
    patched: dict[str, Any] = {"torch": _PatchedModule(vars(trainer)["torch"], save=_save_object, load=_load_object)}
    if "safetensors" in vars(trainer):
        tensors = _PatchedModule(vars(trainer)["safetensors"].torch, save_file=_save_tensors, load_file=_load_tensors)
        patched["safetensors"] = _PatchedModule(vars(trainer)["safetensors"], torch=tensors)
    return patched


class _PatchedModule(ModuleType):
    """A module with some attributes replaced."""

    def __init__(self, behind: ModuleType, **names: Any) -> None:
        super().__init__(behind.__name__, behind.__doc__)
        vars(self).update(names, _module=behind)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["_module"])


def _save_tensors(
    tensors: dict[str, Any], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    from deepnvme._checkpoint.save import save  # noqa: PLC0415

    save(tensors, filename, metadata=metadata, progress=False)


def _load_tensors(filename: str | os.PathLike[str], device: Any = "cpu", **_backend: Any) -> Any:
    from deepnvme._checkpoint.load import load  # noqa: PLC0415

    return load(filename, device=device, progress=False)


def _save_object(obj: object, f: Any, *arguments: Any, **keywords: Any) -> None:
    import torch  # noqa: PLC0415

    from deepnvme._checkpoint.save import save_without_warnings  # noqa: PLC0415

    if isinstance(f, str | os.PathLike):
        # transformers allows the classes of these files when it loads them.
        save_without_warnings(obj, f)
    else:
        torch.save(obj, f, *arguments, **keywords)


def _load_object(f: Any, map_location: Any = None, *arguments: Any, **keywords: Any) -> Any:
    import torch  # noqa: PLC0415

    from deepnvme.integrations._torch_load import load_as_torch  # noqa: PLC0415

    if isinstance(f, str | os.PathLike):
        return load_as_torch(f, map_location, weights_only=keywords.get("weights_only") is not False)
    return torch.load(f, map_location, *arguments, **keywords)
