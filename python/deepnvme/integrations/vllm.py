"""vLLM's load format ``deepnvme``: ``vllm serve MODEL --load-format deepnvme``; and embedding tables on disk.

The wheel registers this module in the entry-point group ``vllm.general_plugins``. It changes nothing until the load
format is used, or the environment sets ``DEEPNVME_TABLES``.

vLLM itself finds, downloads, filters and checks the files, as for ``--load-format safetensors``.

Settings of the load format, in ``--model-loader-extra-config '{"prefetch_bytes": "1GB"}'``: ``prefetch_bytes``, the
bytes that are read ahead (default 512 MiB for each rank), and ``verify``, as for ``deepnvme.load``.

Embedding tables on disk, with any load format that maps safetensors files:

- ``DEEPNVME_TABLES``: the tables that stay in the checkpoint: ``all``, a size from which they do, or some of
  ``embed_tokens_per_layer`` (Gemma 3n and 4), ``ngram_embedding`` (Qwen4), ``engram`` (DeepSeek-V4.1) and
  ``oe_embedder`` (LongCat).
- ``DEEPNVME_TABLES_MEMORY``: memory of each rank for rows of these tables. Default: 1 GiB.

Example::

    vllm serve MODEL --load-format deepnvme --model-loader-extra-config '{"prefetch_bytes": "1GB"}'
    DEEPNVME_TABLES=all DEEPNVME_TABLES_MEMORY=4GB vllm serve MODEL --load-format deepnvme
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from deepnvme.errors import InvalidArgumentError
from deepnvme.integrations._server_methods import with_globals
from deepnvme.integrations._server_settings import split_settings
from deepnvme.integrations._tables.loading import iterate_but_tables
from deepnvme.integrations._tables.settings import TableSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["LOAD_FORMAT", "loader_class", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)


LOAD_FORMAT = "deepnvme"


def register() -> None:
    """Register the load format ``deepnvme`` with vLLM, and the embeddings of ``DEEPNVME_TABLES``.

    vLLM calls this in each process; a second call does nothing.

    Raises:
        ValueError: a variable of the environment has no valid value.
    """
    from vllm.model_executor import model_loader  # noqa: PLC0415

    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT not in known:
        model_loader.register_model_loader(LOAD_FORMAT)(loader_class())
    tables = TableSettings.from_environment()
    if tables.is_enabled:
        from deepnvme.integrations._vllm.tables import install  # noqa: PLC0415

        install(tables)


def loader_class() -> Any:
    """Return the loader: a ``DefaultModelLoader`` that reads through deepnvme.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: this version of vLLM reads in a way that deepnvme does not know; raised when a model is loaded.
        ValueError: the model needs vLLM's own way to read; raised when a model is loaded.
    """
    import vllm  # noqa: PLC0415
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: PLC0415

    class DeepnvmeModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's own loader, with another way to read."""

        def __init__(self, load_config: Any) -> None:
            self._settings, theirs = split_settings(load_config)
            theirs.load_format = "safetensors"
            # This option chooses between vLLM's own ways to read. Here there is only one.
            theirs.model_loader_extra_config.pop("enable_multithread_load", None)
            super().__init__(theirs)

        def _get_weights_iterator(self, source: Any) -> Any:
            host = f"vLLM {vllm.__version__}"
            method = with_globals(
                DefaultModelLoader._get_weights_iterator,  # noqa: SLF001
                host,
                safetensors_weights_iterator=self._read,
            )
            return method(self, source)

        def _read(
            self,
            files: list[str],
            _progress: object = None,
            strategy: str | None = None,
            local_expert_ids: set[int] | None = None,
            **_prefetching: Any,
        ) -> Iterator[tuple[str, torch.Tensor]]:
            if strategy == "torchao":
                msg = "torchao's tensors need vLLM's own way to read; use --load-format safetensors"
                raise InvalidArgumentError(msg)
            wanted = None if local_expert_ids is None else _filter(local_expert_ids)
            ordered: list[str] = sorted(files, key=_by_number)
            return iterate_but_tables(ordered, wanted=wanted, **self._settings)

    return DeepnvmeModelLoader


def _filter(local_expert_ids: set[int]) -> Any:
    """Skip experts of other ranks before they are read."""
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight  # noqa: PLC0415

    return lambda name: not should_skip_weight(name, local_expert_ids)


def _by_number(path: str) -> list[tuple[int, str]]:
    """Sort shard 10 after shard 9, like vLLM."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
