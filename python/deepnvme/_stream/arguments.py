"""Check the arguments of ``stream``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from deepnvme._utils.devices import check_device, parsed_device
from deepnvme._utils.tensors import checked_dtype
from deepnvme.errors import InvalidArgumentError, UnsupportedError

# Short names of dtypes, as those of `deepnvme pack`. The names of torch are accepted as well.
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_type(model: object) -> None:
    """Refuse what is neither a folder nor a module."""
    if not isinstance(model, str | bytes | os.PathLike | nn.Module):
        raise TypeError(f"model is {type(model).__name__}; it must be a folder, or a torch.nn.Module")


def parse_dtype(dtype: object) -> Any:
    """Return ``"auto"`` or the dtype that an argument names."""
    if not isinstance(dtype, str):
        return checked_dtype(dtype)
    found = _DTYPES.get(dtype, getattr(torch, dtype, None))
    if dtype == "auto" or isinstance(found, torch.dtype):
        return found or dtype
    words = ", ".join(map(repr, ("auto", *_DTYPES)))
    raise InvalidArgumentError(f"dtype is {dtype!r}; it must be one of {words}, or a torch.dtype")


def checked_device(device: str | torch.device) -> torch.device:
    """Return a device to which weights can be streamed."""
    place = parsed_device(device)
    if place.type == "cuda" and getattr(torch.version, "hip", None):
        raise UnsupportedError("streaming to AMD GPUs is not supported yet; use device='cpu'")
    if place.type not in {"cpu", "cuda"}:
        raise UnsupportedError(f"weights can be streamed to the CPU and to CUDA devices, not to {place}")
    check_device(place)
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place
