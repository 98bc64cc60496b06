"""``VocabParallelEmbedding`` with its table on disk: per-layer embeddings of Gemma 3n and 4, and LongCat's n-grams."""

from __future__ import annotations

import contextlib
import contextvars
import re
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from deepnvme.errors import UnsupportedError
from deepnvme.integrations._tables.settings import TableSettings
from deepnvme.integrations._tables.table import DiskTable
from deepnvme.integrations._tables.weight import row_parameter
from deepnvme.integrations._vllm.fill_rows import number_of, rows_of
from deepnvme.integrations._vllm.refusals import check_config

if TYPE_CHECKING:
    from collections.abc import Iterator

# Gemma 4's name, then Gemma 3n's.
_PER_LAYER = re.compile(r"(^|\.)(embed_tokens_per_layer|per_layer_embed_tokens)$")

# The table that is being built, where vLLM passes no name.
_building: contextvars.ContextVar[str | None] = contextvars.ContextVar("deepnvme_table", default=None)


@contextlib.contextmanager
def building(name: str) -> Iterator[None]:
    """Name the embedding without a prefix that vLLM builds meanwhile."""
    token = _building.set(name)
    try:
        yield
    finally:
        _building.reset(token)


class DiskEmbeddingMethod(QuantizeMethodBase):  # type: ignore[misc]
    """Looks rows up on disk. The embedding masks the ids of other ranks, and adds up their results."""

    requires_device_loading = False

    def __init__(self, table: DiskTable) -> None:
        super().__init__()
        self._table, self._number = table, number_of(table)

    def create_weights(self, *_: Any, **__: Any) -> None:
        """Do nothing: the embedding has its weight."""

    def apply(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refuse a matrix product."""
        msg = f"{self._table.name}: its rows are on disk, and can only be looked up: it cannot be tied to the LM head"
        raise UnsupportedError(msg)

    def embedding(self, _layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        return rows_of(self._table, self._number, ids)


class DiskVocabParallelEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """vLLM's embedding, built without memory if its table stays on disk; otherwise it is vLLM's own."""

    weight: torch.Tensor
    quant_method: QuantizeMethodBase

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        dtype = kwargs.get("params_dtype") or (args[0] if args else None) or torch.get_default_dtype()
        prefix = kwargs.get("prefix") or ""
        name = "embed_tokens_per_layer" if _PER_LAYER.search(prefix) else _building.get()
        settings = TableSettings.from_environment()
        nbytes = num_embeddings * embedding_dim * dtype.itemsize
        if name is None or not settings.keeps_on_disk(name, nbytes):
            # Other code asks for this very class.
            self.__class__ = VocabParallelEmbedding
            VocabParallelEmbedding.__init__(self, num_embeddings, embedding_dim, *args, **kwargs)
            return
        check_config(name)
        with torch.device("meta"):
            super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        if type(self.quant_method) is not UnquantizedEmbeddingMethod or self.num_added_embeddings:
            msg = (
                f"{prefix or name}: {type(self.quant_method).__name__}, or added rows, cannot be read from disk; leave "
                f"{name} out of DEEPNVME_TABLES"
            )
            raise UnsupportedError(msg)
        used = self.shard_indices.num_org_elements
        table = DiskTable(prefix or name, self.weight.shape, self.weight.dtype, used_rows=used)
        self.weight = row_parameter(table, self.weight)
        self.quant_method = DiskEmbeddingMethod(table)
        self.use_fused_embedding = False


def install(_settings: TableSettings) -> None:
    """Register the class with vLLM. A second call does nothing."""
    from vllm.model_executor.custom_op import op_registry_oot  # noqa: PLC0415

    if VocabParallelEmbedding.__name__ not in op_registry_oot:
        PluggableLayer.register_oot(DiskVocabParallelEmbedding, name=VocabParallelEmbedding.__name__)
