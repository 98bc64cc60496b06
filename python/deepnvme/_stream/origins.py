"""Which bytes of which files each weight of a model is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deepnvme._stream.arrival import can_cast
from deepnvme._stream.files import ModelFiles
from deepnvme._stream.pieces import LINE_BYTES
from deepnvme._stream.traced import Traced
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from os import PathLike

    import torch
    from torch import nn

    from deepnvme._deepnvme import Engine, StripeSet
    from deepnvme._stream.pieces import Origin


def existing(
    model: nn.Module, weights: str | PathLike[str] | StripeSet | None, engine: Engine | None, verify: str
) -> tuple[nn.Module, ModelFiles]:
    if getattr(model, "hf_device_map", None) or hasattr(model, "_hf_hook"):
        raise UnsupportedError(
            "accelerate has placed this model (hf_device_map), and moves its weights itself; load it without device_map"
        )
    if weights is None:
        raise UnsupportedError(
            "say where the weights of this module are: deepnvme.save(module.state_dict(), 'weights.safetensors'), "
            "then deepnvme.stream(module, weights='weights.safetensors', memory=...)"
        )
    files = ModelFiles(weights, engine, verify)
    state = dict(named(model))
    unknown = [name for name in files.tensors if name not in state]
    if unknown:
        raise UnsupportedError(f"{weights} has {unknown[0]}, which the module has not")
    for name, origin in files.tensors.items():
        if tuple(state[name].shape) != origin.shape or state[name].dtype != origin.dtype:
            raise UnsupportedError(
                f"{weights}: {name} is {origin.dtype} of shape {origin.shape}; the module has {state[name].dtype} of "
                f"shape {tuple(state[name].shape)}"
            )
    return model, files


def origins(model: nn.Module, files: ModelFiles) -> dict[str, Origin]:
    """Where on disk each parameter and buffer of a model is, under each of its names."""
    tensors = named(model)
    is_traced = any(isinstance(tensor, Traced) for _, tensor in tensors)
    by_tensor: dict[int, Origin] = {}
    for name, tensor in tensors:
        if isinstance(tensor, Traced):
            if not can_cast(tensor.origin.dtype, tensor.dtype):
                raise UnsupportedError(f"{name} is {tensor.origin.dtype} on disk and would be {tensor.dtype} in memory")
            by_tensor[id(tensor)] = tensor.origin.held(tensor.dtype)
        elif name in files.tensors and not is_traced:
            by_tensor.setdefault(id(tensor), _as_in_memory(files.tensors[name], tensor))
    # A weight that modules share is in the file under one of its names.
    for name, tensor in tensors:
        if tensor.is_meta and id(tensor) not in by_tensor:
            raise UnsupportedError(f"{name} is on the meta device, and the files have no bytes for it")
    return {name: by_tensor[id(tensor)] for name, tensor in tensors if id(tensor) in by_tensor}


def _as_in_memory(origin: Origin, tensor: torch.Tensor) -> Origin:
    """Have a weight lie as the one does that results are compared with, where that is in memory now."""
    if tensor.device.type != "cpu":
        return origin
    residue = tensor.data_ptr() % LINE_BYTES
    return replace(origin, residue=residue if residue % tensor.dtype.itemsize == 0 else 0)


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]
