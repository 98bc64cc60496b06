"""Engram's embedding (DeepSeek-V4.1) with its table on disk."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.engram import Engram, EngramEmbedding, EngramHasher

from deepnvme.errors import UnsupportedError
from deepnvme.integrations._sglang.tables import wrapped_methods
from deepnvme.integrations._tables.scaled import ScaledRows, scale_parameter
from deepnvme.integrations._tables.table import DiskTable
from deepnvme.integrations._tables.weight import row_parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepnvme.integrations._tables.settings import TableSettings

_NAME = "engram"
# Their tables are in memory, read by kernels.
_IN_MEMORY = ("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS")


class DiskEngramEmbedding(EngramEmbedding):  # type: ignore[misc]
    """SGLang's embedding, with reads from disk. Its weight loader records each rank's rows."""

    scaled: ScaledRows
    """The rows of this rank."""

    def _table_ptrs(self) -> tuple[int, int]:
        msg = f"{_NAME} is on disk (DEEPNVME_TABLES), and has no memory that a kernel could read"
        raise UnsupportedError(msg)

    def _owned_rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self.scaled.start(indices).finish()


@contextlib.contextmanager
def building(settings: TableSettings) -> Iterator[None]:
    """Build each ``EngramEmbedding`` on disk."""

    def embedding(
        original: Any, self: Any, num_embeddings: int, dim: int, layer_id: int, *args: Any, **kw: Any
    ) -> None:
        if not settings.keeps_on_disk(_NAME, num_embeddings * dim):
            original(self, num_embeddings, dim, layer_id, *args, **kw)
            return
        for name in _IN_MEMORY:
            if getattr(envs, name).get():
                msg = f"{_NAME} is on disk (DEEPNVME_TABLES), and {name} keeps it in memory; leave one of them out"
                raise UnsupportedError(msg)
        with torch.device("meta"):
            original(self, num_embeddings, dim, layer_id, *args, **kw)
        name = f"{_NAME} {layer_id}"
        table = DiskTable(name, self.weight.shape, self.weight.dtype)
        scales = scale_parameter(table, f"{name}: scales", self.scale.shape[1], self.scale.dtype)
        scales.weight_loader = self.scale.weight_loader  # type: ignore[attr-defined]
        self.weight, self.scale = row_parameter(table, self.weight), scales
        self.scaled = ScaledRows(self.weight, scales, self.row_start)
        self.__class__ = DiskEngramEmbedding

    with wrapped_methods((EngramEmbedding, "__init__", embedding)):
        yield


def finish(model: torch.nn.Module) -> None:
    """Prefetch the rows of all layers once their ids are known, before the first layer."""
    layers = [
        (module.layer_hash_index, module.embed.scaled)
        for module in model.modules()
        if isinstance(module, Engram) and isinstance(module.embed, DiskEngramEmbedding)
    ]
    for module in model.modules():
        if layers and isinstance(module, EngramHasher):
            module.register_forward_hook(functools.partial(_prefetch, layers))


def _prefetch(layers: list[tuple[int, ScaledRows]], _hasher: Any, _args: Any, ids: torch.Tensor) -> None:
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        # The look-up refuses it, with a message.
        return
    numbers = ids.detach().cpu()
    for index, rows in layers:
        rows.prefetch(numbers[:, index])
