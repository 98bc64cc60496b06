"""``deepnvme.save``, ``deepnvme.load`` and ``deepnvme.Checkpointer``.

``pickler`` takes an object apart into a pickle and storages, ``factory`` makes objects of what a pickle describes,
``arena`` is the memory that a load fills, ``names`` the way to a tensor in a nested state. The bytes are moved by Rust.
"""

from deepnvme._checkpoint.checkpointer import Checkpointer
from deepnvme._checkpoint.manifest import Checkpoint
from deepnvme._checkpoint.reading import load
from deepnvme._checkpoint.stats import CheckpointerStats
from deepnvme._checkpoint.writing import save

__all__ = ["Checkpoint", "Checkpointer", "CheckpointerStats", "load", "save"]
