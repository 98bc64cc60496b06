"""Engram's embedding (DeepSeek-V4.1) with its table on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.distributed import get_engram_dp_size
from vllm.models.deepseek_v41.common.engram import Engram, ParallelEngramEmbedding

from deepnvme.errors import UnsupportedError
from deepnvme.integrations._tables.scaled import ScaledRows, scale_parameter
from deepnvme.integrations._tables.settings import TableSettings
from deepnvme.integrations._tables.table import DiskTable
from deepnvme.integrations._tables.weight import RowWeight
from deepnvme.integrations._vllm.around import wrap_method
from deepnvme.integrations._vllm.refusals import check_config

if TYPE_CHECKING:
    from deepnvme.integrations._tables.scaled import PendingScaledRows

_NAME = "engram"


class DiskEngramEmbedding(ParallelEngramEmbedding):  # type: ignore[misc]
    """vLLM's embedding, with reads from disk instead of its kernel. Its weight loader records each rank's heads."""

    def __init__(self, num_embeddings: int, dim: int, head_sizes: tuple[int, ...], layer: int) -> None:
        self._layer = layer
        # Not in pinned memory: that would ask for a GPU that reads it.
        super().__init__(num_embeddings, dim, head_sizes, cpu_offload=False)
        self._scaled = ScaledRows(self.weight, self.weight_scale_inv, self.vocab_start_idx)
        self._pending: tuple[PendingScaledRows, torch.Tensor, int] | None = None
        # Engram then starts each look-up before the decoder layers, and waits for it in the layer that needs it.
        self.cpu_offload = True

    def _get_shard_info(self) -> tuple[int, int]:
        # Each data-parallel replica reads for itself, as if they shared the table in memory.
        self.dp_size = 1
        shards: tuple[int, int] = super()._get_shard_info()
        return shards

    def _allocate_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"{_NAME} {self._layer}"
        rows = DiskTable(name, (self.part_num_embeddings, self.dim), torch.float8_e4m3fn)
        scales = scale_parameter(rows, f"{name}: scales", self.dim // self.block_size, torch.uint8)
        return RowWeight(rows), scales.data

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """Look up this rank's heads, or start that in the background."""
        if out.dtype != torch.bfloat16:
            msg = f"{_NAME}: packed rows cannot be read from disk; set dp_shared_memory in --engram-config"
            raise UnsupportedError(msg)
        heads = indices[:, self.head_start : self.head_start + self.part_n_hash_cols]
        self._pending = self._scaled.start(heads), out, heads.shape[1]
        if not background:
            self.finish()

    def finish(self) -> None:
        """Wait for the look-up in the background, if there is one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        rows, out, heads = pending
        out[:, :heads].copy_(rows.finish())
        # The last rank may have fewer heads; all ranks exchange equally many.
        out[:, heads:].zero_()


def _create_embedding(original: Any, self: Any, layout: Any, layer_hash_index: int) -> Any:
    sizes = tuple(size for order in layout.primes[layer_hash_index] for size in order)
    count = layout.num_embeddings[layer_hash_index]
    if not TableSettings.from_environment().keeps_on_disk(_NAME, count * layout.head_dim):
        return original(self, layout, layer_hash_index)
    check_config(_NAME)
    config = get_current_vllm_config().engram_config
    if get_engram_dp_size() > 1 and not (config is not None and config.dp_shared_memory):
        msg = (
            f"{_NAME} is on disk (DEEPNVME_TABLES), and would be spread over data-parallel replicas, which is not "
            "supported: set dp_shared_memory in --engram-config, and not embedding_across_dp"
        )
        raise UnsupportedError(msg)
    return DiskEngramEmbedding(count, layout.head_dim, sizes, layout.layer_ids[layer_hash_index])


@eager_break_during_capture  # type: ignore[untyped-decorator]
def _finish_rows(embedding: DiskEngramEmbedding) -> None:
    embedding.finish()


def _ready_rows(original: Any, self: Any, num_tokens: int) -> torch.Tensor:
    if isinstance(self.embed_tokens, DiskEngramEmbedding):
        _finish_rows(self.embed_tokens)
    rows: torch.Tensor = original(self, num_tokens)
    return rows


def install(_settings: TableSettings) -> None:
    """Replace the method that makes Engram's embedding, and wait for its rows. A second call does nothing."""
    wrap_method(Engram, "_create_embedding", _create_embedding)
    wrap_method(Engram, "_ready_rows", _ready_rows)
