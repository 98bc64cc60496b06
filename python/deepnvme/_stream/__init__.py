"""Run models whose weights stay on disk.

- ``streaming``: the public API, :func:`stream` and :class:`Streaming`.
- ``model_files``, ``weight_origin``, ``huggingface``: find the bytes of each weight. ``huggingface`` also refuses a
  hostile ``config.json`` before transformers reads it.
- ``memory_budget``, ``planner``: decide what is loaded together, and where in memory. Pure.
- ``layer_cache``, ``row_cache``, ``parameter_binding``: load weights around each ``forward``, and in the end give a
  module its own weights back. ``row_cache`` loads rows of large tables, also for models on a GPU.
- ``calling_threads``: threads that run one model take turns, and a close waits for them.
- ``stats``, ``throughput``: counters, large batches.
- ``commands``: ``deepnvme generate`` and ``deepnvme stream-bench``. ``benchmark`` is the second.
"""

from deepnvme._stream.stats import Step, StreamStats
from deepnvme._stream.streaming import Streaming, stream

__all__ = ["Step", "StreamStats", "Streaming", "stream"]
