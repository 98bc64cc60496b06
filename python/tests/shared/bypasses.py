"""Functions of torch that read a tensor without calling its ``__torch_function__``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

needs_refusals = pytest.mark.skipif(
    not hasattr(torch._C, "_set_storage_access_error_msg"),
    reason="this torch cannot refuse access to a tensor's memory",
)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# Each has an error of its own for a tensor that is on disk.
BYPASSES: dict[str, Callable[[Any], Any]] = {
    "tensor": torch.tensor,
    "as_tensor": lambda tensor: torch.as_tensor(tensor, dtype=torch.float64),
    "asarray": lambda tensor: torch.asarray(tensor, copy=True),
    "as_subclass": lambda tensor: tensor.as_subclass(torch.Tensor) + 1,
}
