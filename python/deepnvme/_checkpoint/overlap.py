"""Saves of tensors that only an optimizer changes: its next step waits for them, and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def before_each_step(optimizers: tuple[torch.optim.Optimizer, ...], wait: Callable[[], None]) -> Iterator[None]:
    """Call ``wait`` before each step of these optimizers, and when the block ends."""
    hooks = [optimizer.register_step_pre_hook(lambda *_: wait()) for optimizer in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        wait()
