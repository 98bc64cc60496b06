"""A wait before each step of optimizers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


@contextmanager
def before_each_step(optimizers: tuple[torch.optim.Optimizer, ...], wait: Callable[[], None]) -> Iterator[None]:
    """Call ``wait`` before each step of these optimizers, and at the end of the block."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(f"overlap takes optimizers of torch, not {type(optimizer).__name__}")
    hooks = [optimizer.register_step_pre_hook(lambda *_: wait()) for optimizer in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        wait()
