"""Weights that stay on disk while a model runs.

``files`` knows where each tensor is, ``traced`` follows it into the model (``huggingface``, ``origins``), ``arrival``
says what it becomes on the way, ``partition`` finds what is fetched together, ``budget`` and ``layout`` decide where
it goes, ``plan`` puts that together. ``units``, ``picked`` and ``kept`` bring it there, ``wrapped`` around the
``forward`` of modules that have it ``shown`` meanwhile, ``turns`` between threads. ``steps`` counts, ``roofline``
measures what could be, ``throughput`` makes batches for ``commands``.
"""

from deepnvme._stream.steps import Step, StreamStats
from deepnvme._stream.streaming import Streaming, stream

__all__ = ["Step", "StreamStats", "Streaming", "stream"]
