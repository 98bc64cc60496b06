"""A storage writer and a storage reader for ``torch.distributed.checkpoint``.

A checkpoint is a folder. Each rank writes its tensors into one safetensors file, and ``deepnvme.json`` lists which file
contains which part of which tensor. The coordinator replaces this index atomically once all files are on disk. Until
then the old checkpoint counts. Afterwards, only files that the old index recorded as its own are removed. Only
non-tensor values are pickled. ``DeepnvmeReader`` refuses code that you did not allow, like ``deepnvme.load``.

Example::

    import torch.distributed.checkpoint as dcp
    from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

    dcp.save(state, storage_writer=DeepnvmeWriter("step_100"))
    dcp.load(state, storage_reader=DeepnvmeReader("step_100"))  # also at another world size
"""

from deepnvme._checkpoint.dcp.reader import DeepnvmeReader
from deepnvme._checkpoint.dcp.writer import DeepnvmeWriter

__all__ = ["DeepnvmeReader", "DeepnvmeWriter"]


def __dir__() -> list[str]:
    return sorted(__all__)
