"""LongCat's n-gram embedding with its table on disk. vLLM builds it without a name, inside ``NgramEmbedding``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.longcat_flash_ngram import NgramEmbedding

from deepnvme.integrations._vllm import vocab
from deepnvme.integrations._vllm.around import wrap_method

if TYPE_CHECKING:
    from deepnvme.integrations._tables.settings import TableSettings


def _init_ngram_embeddings(original: Any, self: Any) -> None:
    with vocab.building("oe_embedder"):
        original(self)


def install(settings: TableSettings) -> None:
    """Name the embedding that ``NgramEmbedding`` builds. A second call does nothing."""
    vocab.install(settings)
    wrap_method(NgramEmbedding, "_init_ngram_embeddings", _init_ngram_embeddings)
