"""Qwen4's n-gram embedding (PLE) with its table on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.models.qwen4_exp.common.ngram_embedding import (
    Qwen4ExpPLEDeviceEmbedding,
    Qwen4ExpPLEEmbedding,
    Qwen4ExpPLEPinnedHostEmbedding,
)

from deepnvme.integrations._tables.settings import TableSettings
from deepnvme.integrations._tables.shard import OwnedRows
from deepnvme.integrations._tables.table import DiskTable
from deepnvme.integrations._tables.weight import RowWeight
from deepnvme.integrations._vllm.refusals import check_config

if TYPE_CHECKING:
    from deepnvme.integrations._tables.shard import PendingOwnedRows

_NAME = "ngram_embedding"


class _DiskPLEEmbedding(Qwen4ExpPLEPinnedHostEmbedding, Qwen4ExpPLEDeviceEmbedding):  # type: ignore[misc]
    """vLLM's embedding, with reads from disk instead of its kernel over pinned memory.

    ``start_prefetch`` starts the reads as soon as vLLM knows the ids: one layer before they are needed.
    ``_finalize_prefetch`` waits for them. vLLM runs both between the pieces of a CUDA graph.
    """

    _replaced: type[Qwen4ExpPLEEmbedding]

    def __init__(self, num_embeddings: int, embedding_dim: int, **kwargs: Any) -> None:
        # At least one byte an element.
        if not TableSettings.from_environment().keeps_on_disk(_NAME, num_embeddings * embedding_dim):
            # Other code asks for this very class.
            self.__class__ = replaced = self._replaced
            replaced.__init__(self, num_embeddings, embedding_dim, **kwargs)
            return
        check_config(kwargs["prefix"])
        # The constructors of both kinds would ask for a GPU.
        Qwen4ExpPLEEmbedding.__init__(self, num_embeddings, embedding_dim, **kwargs)
        # vLLM's class of parameters sets these; a parameter without memory cannot be of that class.
        for name, value in (("input_dim", 1), ("output_dim", 0), ("weight_loader", self.weight_loader)):
            setattr(self.weight, name, value)
        self._num_ngram_heads = kwargs.get("num_ngram_heads", 1)
        self._output_dim = self._num_ngram_heads * self.embedding_dim
        self._prefetch_rows = kwargs.get("max_total_tokens", 0) * self.etp_data_parallel_size
        self._prefetch_buffer: torch.Tensor | None = None
        self._pending: PendingOwnedRows | None = None
        self._owned = OwnedRows(self.weight.table, self.shard_indices.org_vocab_start_index)

    def allocate_embedding_weight(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate nothing."""
        used = self.shard_indices.num_org_elements
        return RowWeight(DiskTable(self.prefix, (num_embeddings, embedding_dim), dtype, used_rows=used))

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def start_prefetch(self, ngram_ids: torch.Tensor) -> None:
        """Start the reads of this rank's rows."""
        if self._prefetch_buffer is None:
            # At a fixed address, for the graphs that read it.
            shape = (self._prefetch_rows, self._num_ngram_heads, self.embedding_dim)
            self._prefetch_buffer = torch.empty(shape, dtype=self.weight.dtype, device=ngram_ids.device)
        slot_size, _ = self._get_dp_gather_slot(ngram_ids.shape[0])
        ids = self._gather_dp_ids(ngram_ids, slot_size)
        if ids.shape[0] > self._prefetch_rows:
            msg = (
                f"{self.prefix}: the batch has {ids.shape[0]} tokens, and at most {self._prefetch_rows} were announced"
            )
            raise ValueError(msg)
        self._pending = self._owned.start(ids, self._prefetch_buffer[: ids.shape[0]])

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def _finalize_prefetch(self, prefetch_output: torch.Tensor, output: torch.Tensor) -> None:
        """Wait for the rows, add those of other ranks, and select this rank's tokens."""
        pending, self._pending = self._pending, None
        if pending is None:
            msg = f"{self.prefix}: start_prefetch was not called"
            raise RuntimeError(msg)
        pending.finish()
        slot_size, slot_offset = self._get_dp_gather_slot(output.shape[0])
        rows = prefetch_output[: slot_size * self.etp_data_parallel_size]
        if self.reduce_results:
            rows = self._reduce_etp_embeddings(rows)
        output.copy_(self._select_embeddings(rows, output.shape[0], slot_offset).flatten(-2))

    def _lookup(self, input_ids: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        return self._owned.start(input_ids, output).finish()


class DiskPLEPinnedHostEmbedding(_DiskPLEEmbedding):
    """In place of the embedding in pinned memory."""

    _replaced = Qwen4ExpPLEPinnedHostEmbedding


class DiskPLEDeviceEmbedding(_DiskPLEEmbedding):
    """In place of the embedding in memory of the device."""

    _replaced = Qwen4ExpPLEDeviceEmbedding


def install(_settings: TableSettings) -> None:
    """Register the classes with vLLM. A second call does nothing."""
    for kind in (DiskPLEPinnedHostEmbedding, DiskPLEDeviceEmbedding):
        name = kind._replaced.__name__  # noqa: SLF001
        if name not in op_registry_oot:
            PluggableLayer.register_oot(kind, name=name)
