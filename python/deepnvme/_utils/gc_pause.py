"""Python's cycle collector, and when it had better not run."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the collector from running, as a ``with`` block or as a decorator.

    What describes ten thousand tensors are ten thousand new objects, all of which stay. Looking for garbage among them,
    and then in all of the process, takes several times as long as making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
