"""LongCat's n-gram embedding with its table on disk."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.n_gram_embedding import NgramEmbedding
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from deepnvme.integrations._sglang.tables import wrapped_methods
from deepnvme.integrations._sglang.vocab import build_on_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepnvme.integrations._tables.settings import TableSettings

_NAME = "oe_embedder"


@contextlib.contextmanager
def building(settings: TableSettings) -> Iterator[None]:
    """Build the second embedding of an ``NgramEmbedding`` on disk. The first one is that of words."""
    counts: list[int] = []

    def owner(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        counts.append(0)
        try:
            original(self, *args, **kwargs)
        finally:
            counts.pop()

    def embedding(original: Any, self: Any, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        if counts:
            counts[-1] += 1
        nbytes = num_embeddings * embedding_dim * torch.get_default_dtype().itemsize
        if counts[-1:] == [2] and settings.keeps_on_disk(_NAME, nbytes):
            build_on_disk(original, self, _NAME, num_embeddings, embedding_dim, *args, **kwargs)
        else:
            original(self, num_embeddings, embedding_dim, *args, **kwargs)

    with wrapped_methods((NgramEmbedding, "__init__", owner), (VocabParallelEmbedding, "__init__", embedding)):
        yield


def finish(_model: Any) -> None:
    """Do nothing: the ids are known when the look-up begins."""
