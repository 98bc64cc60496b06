"""Compare a module with the files of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._modules.weight_classes import has_no_values, is_on_disk
from deepnvme._stream.model_files import ModelFiles
from deepnvme._stream.weight_provenance import named_tensors
from deepnvme._utils.public import first_of, warn_caller
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from os import PathLike

    import torch
    from torch import nn

    from deepnvme._deepnvme import Engine, StripeSet


def open_for_module(
    model: nn.Module, weights: str | PathLike[str] | StripeSet | None, engine: Engine | None, verify: str
) -> tuple[nn.Module, ModelFiles]:
    if getattr(model, "hf_device_map", None) or hasattr(model, "_hf_hook"):
        raise UnsupportedError(
            "accelerate has placed this model (hf_device_map) and moves its weights itself; load it without device_map"
        )
    if weights is None:
        raise UnsupportedError(
            "a module needs a file with its weights: deepnvme.save(module.state_dict(), 'weights.safetensors'), "
            "then deepnvme.stream(module, weights='weights.safetensors', memory=...)"
        )
    files = ModelFiles(weights, engine, verify)
    state = dict(named_tensors(model))
    if (on_disk := next((name for name, tensor in state.items() if is_on_disk(tensor)), None)) is not None:
        raise UnsupportedError(
            f"{on_disk} is on disk already: a part of this model, or a model that shares it, is offloaded or streamed; "
            "close that first"
        )
    unknown = [name for name in files.tensors if name not in state]
    if unknown:
        raise UnsupportedError(
            f"{weights} contains {unknown[0]}, which the module lacks; save the module's own state dict"
        )
    for name, origin in files.tensors.items():
        if tuple(state[name].shape) != origin.shape or state[name].dtype != origin.dtype:
            raise UnsupportedError(
                f"{weights}: {name} is {origin.dtype} of shape {origin.shape}; the module has {state[name].dtype} of "
                f"shape {tuple(state[name].shape)}"
            )
    _warn_of_own_values(model, weights, files, state)
    return model, files


def _warn_of_own_values(model: nn.Module, weights: object, files: ModelFiles, state: dict[str, torch.Tensor]) -> None:
    """Name the parameters that keep the module's values, because the files lack them."""
    loaded = {id(state[name]) for name in files.tensors}
    kept = [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in loaded and not has_no_values(parameter)
    ]
    if kept:
        warn_caller(f"{weights} lacks {first_of(kept)}; the model keeps the module's own values for them")
