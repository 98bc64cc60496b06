"""Stream capture: copies by torch must not invalidate a CUDA graph that another thread captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from deepnvme._deepnvme import _exchange_capture_mode
from deepnvme.errors import UnsupportedError

_NOTHING = nullcontext()
# ``CU_STREAM_CAPTURE_MODE_RELAXED``: this thread may make any call during another thread's capture.
_RELAXED = 2


def relaxed_capture_for(device: torch.device) -> AbstractContextManager[None]:
    """Return :func:`relaxed_capture` for a GPU, and for the CPU a context that does nothing.

    Raises:
        UnsupportedError: this thread captures a graph on its current stream of the GPU.
    """
    if device.type != "cuda":
        return _NOTHING
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        msg = "a CUDA graph is being captured on this thread's stream, and a transfer cannot be part of a graph"
        raise UnsupportedError(f"{msg}; transfer the tensor before or after the capture, or from another stream")
    return relaxed_capture()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Run a block in which allocations, copies and waits are allowed while another thread captures a graph.

    By default they would fail and invalidate the capture.
    """
    before = None
    try:
        before = _exchange_capture_mode(_RELAXED)
        yield
    finally:
        if before is not None:
            _exchange_capture_mode(before)
