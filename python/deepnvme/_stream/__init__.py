"""Run models whose weights stay on disk.

- ``streaming``: the public API, :func:`stream` and :class:`Streaming`.
- ``arguments``: checks the arguments of :func:`stream`.
- ``model_files``, ``weight_origin``, ``weight_provenance``, ``huggingface``: find the bytes of each weight.
- ``config_limits``: refuses a hostile ``config.json`` before transformers reads it.
- ``memory_budget``, ``planner``: decide what is loaded together, and where in memory. Pure.
- ``layer_cache``, ``row_cache``, ``resident_weights``, ``parameter_binding``: load weights around each ``forward``.
- ``gathered_rows``: rows of large tables, for models on a GPU.
- ``original_weights``: gives a module its own weights back in the end, with the changes of its buffers.
- ``calling_threads``: threads that run one model take turns, and a close waits for them.
- ``stats``, ``throughput``: counters, large batches.
- ``commands``: ``deepnvme generate`` and ``deepnvme stream-bench``. ``benchmark`` is the second.
"""

from deepnvme._stream.stats import Step, StreamStats
from deepnvme._stream.streaming import Streaming, stream

__all__ = ["Step", "StreamStats", "Streaming", "stream"]
