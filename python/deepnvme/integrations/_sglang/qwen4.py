"""Qwen4's n-gram embedding (PLE) with its table on disk."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models import qwen4_exp
from sglang.srt.models.qwen4_exp import Qwen4ExpNGramEmbedding, Qwen4ExpPinnedHostEmbedding

from deepnvme.integrations._sglang.tables import wrapped_methods
from deepnvme.integrations._sglang.vocab import build_on_disk
from deepnvme.integrations._tables.shard import OwnedRows
from deepnvme.integrations._tables.table import DiskTable
from deepnvme.integrations._tables.weight import RowWeight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepnvme.integrations._tables.settings import TableSettings
    from deepnvme.integrations._tables.shard import PendingOwnedRows

_NAME = "ngram_embedding"


class DiskHostEmbedding(Qwen4ExpPinnedHostEmbedding):  # type: ignore[misc]
    """SGLang's embedding in host memory (``--ple-offload-embedding``), with reads from disk instead of its kernel.

    SGLang calls ``gather`` one layer before the rows are needed, and ``reduce`` when they are. It runs both between
    the pieces of a CUDA graph.
    """

    _pending: list[PendingOwnedRows]
    _owned: OwnedRows

    def gather(self, input_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Start the reads of this rank's rows, and return the tensor that they come to."""
        if out is None:
            out = self.allocate_output((*input_ids.shape, self.embedding_dim), input_ids.device)
        self._pending.append(self._owned.start(input_ids, out))
        return out

    def reduce(self, output: torch.Tensor) -> torch.Tensor:
        """Wait for the rows, and add those of other ranks."""
        pending, self._pending = self._pending, []
        for rows in pending:
            rows.finish()
        reduced: torch.Tensor = super().reduce(output)
        return reduced


@contextlib.contextmanager
def building(settings: TableSettings) -> Iterator[None]:
    """Build the embedding of a ``Qwen4ExpNGramEmbedding`` on disk."""
    offloads: list[bool] = []
    shards: list[Any] = []

    def owner(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        offloads.append(bool(config.ple_offload_embedding))
        try:
            original(self, config, *args, **kwargs)
        finally:
            offloads.pop()

    def embedding(original: Any, self: Any, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        dtype = kwargs.get("params_dtype") or torch.get_default_dtype()
        # With an offload, SGLang builds this one without memory, and then the one in host memory.
        is_table = offloads[-1:] == [False]
        if is_table and settings.keeps_on_disk(_NAME, num_embeddings * embedding_dim * dtype.itemsize):
            build_on_disk(original, self, _NAME, num_embeddings, embedding_dim, *args, **kwargs)
        else:
            original(self, num_embeddings, embedding_dim, *args, **kwargs)

    def host(original: Any, self: Any, source: Any, **kwargs: Any) -> None:
        nbytes = source.num_embeddings * source.embedding_dim * source.weight.dtype.itemsize
        if not settings.keeps_on_disk(_NAME, nbytes):
            original(self, source, **kwargs)
            return
        shards.append(source.shard_indices)
        try:
            original(self, source, **kwargs)
        finally:
            shards.pop()
        self.__class__ = DiskHostEmbedding
        self._pending = []
        self._owned = OwnedRows(self.weight.table, self.shard_indices.org_vocab_start_index)

    def allocate(original: Any, shape: Any, dtype: torch.dtype, **kwargs: Any) -> torch.Tensor:
        if not shards:
            table: torch.Tensor = original(shape=shape, dtype=dtype, **kwargs)
            return table
        return RowWeight(DiskTable(_NAME, tuple(shape), dtype, used_rows=shards[-1].num_org_elements))

    with wrapped_methods(
        (Qwen4ExpNGramEmbedding, "__init__", owner),
        (VocabParallelEmbedding, "__init__", embedding),
        (Qwen4ExpPinnedHostEmbedding, "__init__", host),
        (qwen4_exp, "allocate_ple_host_table", allocate),
    ):
        yield


def finish(_model: Any) -> None:
    """Do nothing: SGLang starts the look-up ahead itself."""
