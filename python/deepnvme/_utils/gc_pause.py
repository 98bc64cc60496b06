"""Pauses of Python's cycle collector."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cycle collector, in a ``with`` block or as a decorator.

    Describing ten thousand tensors makes ten thousand objects that all stay. Searching them, and then the whole
    process, for garbage takes several times as long as making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
