"""Something around a module's ``forward``, and what makes gradients through it fail.

A pair of hooks would not do: PyTorch leaves out the one behind where Ctrl-C breaks off the call, and calls it where the
one in front has failed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def wrap(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Have a module run by what ``around`` makes of its ``forward``.

    Returns:
        What takes it off again.
    """
    own = module.__dict__.get("forward")
    forward = module.forward
    wrapped = functools.wraps(forward)(around(forward))
    module.forward = wrapped

    def unwrap() -> None:
        if module.__dict__.get("forward") is not wrapped:
            return  # somebody has put something else around it, which goes on to call this
        if own is None:
            del module.forward
        else:
            module.forward = own

    return unwrap


def refuse_backward(memory: torch.Tensor, name: str, output: Any) -> Any:
    """See to it that nobody computes gradients with weights that have made room for others by then.

    Args:
        memory: what the weights lie in.
        name: of the module.
        output: what it has computed.
    """
    if torch.is_grad_enabled():
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refusal(name))  # type: ignore[no-untyped-call]
        # For all outputs of other kinds: what autograd has kept counts as changed.
        if not memory.is_inference():
            torch.autograd.graph.increment_version(memory)
    return output


def _refusal(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(_gradient: torch.Tensor) -> None:
        raise RuntimeError(
            f"there are no gradients through {name}: its weights are on disk again. Streaming is for inference; call "
            "the model under torch.no_grad(), or detach its output"
        )

    return refuse
