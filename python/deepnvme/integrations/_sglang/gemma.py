"""Per-layer embeddings of Gemma 3n and 4 with their table on disk."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding

from deepnvme.errors import UnsupportedError
from deepnvme.integrations._sglang.tables import wrapped_methods
from deepnvme.integrations._tables.table import DiskTable
from deepnvme.integrations._tables.weight import row_parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepnvme.integrations._tables.settings import TableSettings

_NAME = "embed_tokens_per_layer"
_OWNERS = {"sglang.srt.models.gemma3n_causal": "Gemma3nTextModel", "sglang.srt.models.gemma4_causal": "Gemma4TextModel"}


@contextlib.contextmanager
def building(settings: TableSettings) -> Iterator[None]:
    """Build the embedding with the size and scale of a model's per-layer embeddings on disk."""
    wanted: list[tuple[int, int, float]] = []

    def owner(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind = _kind(config)
        if kind is not None and kind == (config.vocab_size, config.hidden_size, config.hidden_size**0.5):
            msg = f"{_NAME} has the shape of the token embedding, {kind[:2]}, and cannot be told from it"
            raise UnsupportedError(msg)
        wanted.extend([] if kind is None else [kind])
        try:
            original(self, config, *args, **kwargs)
        finally:
            wanted.clear()

    def embedding(original: Any, self: Any, rows: int, columns: int, *args: Any, **kwargs: Any) -> None:
        nbytes = rows * columns * torch.get_default_dtype().itemsize
        if (rows, columns, kwargs.get("embed_scale")) not in wanted or not settings.keeps_on_disk(_NAME, nbytes):
            original(self, rows, columns, *args, **kwargs)
            return
        with torch.device("meta"):
            original(self, rows, columns, *args, **kwargs)
        self.weight = row_parameter(DiskTable(_NAME, (rows, columns), self.weight.dtype), self.weight)
        # transformers, whose class these models extend, would fill it with random numbers.
        self._is_hf_initialized = True

    owners = [(sys.modules[module], name) for module, name in _OWNERS.items() if module in sys.modules]
    classes = [getattr(module, name) for module, name in owners if hasattr(module, name)]
    hooks: list[tuple[Any, str, Any]] = [(kind, "__init__", owner) for kind in classes]
    with wrapped_methods(*hooks, (Gemma3TextScaledWordEmbedding, "__init__", embedding)):
        yield


def _kind(config: Any) -> tuple[int, int, float] | None:
    """Return rows, columns and scale of the per-layer embeddings, if the model has them."""
    width = getattr(config, "hidden_size_per_layer_input", 0) or 0
    rows = getattr(config, "vocab_size_per_layer_input", config.vocab_size)
    return (rows, config.num_hidden_layers * width, width**0.5) if width else None


def finish(_model: Any) -> None:
    """Do nothing: the ids are known when the look-up begins."""
