"""SGLang's ``VocabParallelEmbedding`` without memory, for owners that build one inside."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from deepnvme.errors import UnsupportedError
from deepnvme.integrations._tables.table import DiskTable
from deepnvme.integrations._tables.weight import row_parameter


def build_on_disk(original: Any, embedding: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """Call the constructor of an embedding without memory, and put its table on disk.

    SGLang's own code then loads it, looks it up, and adds up the ranks' results.

    Args:
        original: the constructor.
        embedding: the module.
        name: name of the table.
        args: arguments of the constructor.
        kwargs: arguments by name.

    Raises:
        UnsupportedError: it is quantised, or has added rows.
    """
    with torch.device("meta"):
        original(embedding, *args, **kwargs)
    if not isinstance(embedding.quant_method, UnquantizedEmbeddingMethod) or embedding.num_added_embeddings:
        msg = (
            f"{name}: {type(embedding.quant_method).__name__}, or added rows, cannot be read from disk; leave it out "
            "of DEEPNVME_TABLES"
        )
        raise UnsupportedError(msg)
    used = embedding.shard_indices.num_org_elements
    table = DiskTable(name, embedding.weight.shape, embedding.weight.dtype, used_rows=used)
    embedding.weight = row_parameter(table, embedding.weight)
