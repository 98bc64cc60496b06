"""Stream capture: copies by torch must not invalidate a CUDA graph that another thread captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from deepnvme._deepnvme import _exchange_capture_mode

_NOTHING = nullcontext()
# ``CU_STREAM_CAPTURE_MODE_RELAXED``: captures prohibit no call of this thread.
_RELAXED = 2


def relaxed_capture_for(device: torch.device) -> AbstractContextManager[None]:
    """Return :func:`relaxed_capture` for a GPU, and for the CPU a context that does nothing."""
    return relaxed_capture() if device.type == "cuda" else _NOTHING


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Run a block whose allocations, copies and waits no capture of another thread prohibits.

    In the driver's default mode they fail, and invalidate the capture.
    """
    before = _exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        if before is not None:
            _exchange_capture_mode(before)
