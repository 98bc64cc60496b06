"""Functions of torch that read a tensor without calling its ``__torch_function__``.

For a tensor on disk, `BYPASSES` and `scripted` must raise instead of reading zeros. `needs_refusals` skips tests of
that where torch cannot refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# torch 2.10 has this function; older ones may lack it.
needs_refusals = pytest.mark.skipif(
    not hasattr(torch._C, "_set_storage_access_error_msg"),
    reason="this torch cannot refuse access to a tensor's memory",
)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    """Add one in TorchScript, which calls no ``__torch_function__``."""
    return x + 1


# Each must raise for a tensor on disk instead of reading zeros.
BYPASSES: dict[str, Callable[[Any], Any]] = {
    "tensor": torch.tensor,
    "as_tensor": lambda tensor: torch.as_tensor(tensor, dtype=torch.float64),
    "asarray": lambda tensor: torch.asarray(tensor, copy=True),
    "as_subclass": lambda tensor: tensor.as_subclass(torch.Tensor) + 1,
}
