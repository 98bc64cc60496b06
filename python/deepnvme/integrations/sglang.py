"""SGLang with models larger than memory: layers that stream from NVMe, and embedding tables that stay there.

The wheel registers this module in the entry-point group ``sglang.srt.plugins``. It changes nothing until the
environment sets ``DEEPNVME_OFFLOAD_DIR`` or ``DEEPNVME_TABLES``.

With ``DEEPNVME_OFFLOAD_DIR``, deepnvme's offloader replaces SGLang's own in each process, so that every rank has its
own file with the weights that it needs.

- ``DEEPNVME_OFFLOAD_DIR``: a folder on the disk to stream from, with space for the weights. Its files have no names,
  and vanish with their processes.
- ``DEEPNVME_OFFLOAD_MEMORY``: memory of each rank for streamed weights, on the device of the model; ``"4GB"``.
  Default: three times the largest layer.
- ``DEEPNVME_OFFLOAD_PREFETCH_LAYERS``: layers to read ahead. Default: 2, if they fit.

With ``DEEPNVME_TABLES``, embedding tables stay in the checkpoint, with any load format that maps safetensors files.

- ``DEEPNVME_TABLES``: the tables: ``all``, a size from which they stay there, or some of ``embed_tokens_per_layer``
  (Gemma 3n and 4), ``ngram_embedding`` (Qwen4), ``engram`` (DeepSeek-V4.1) and ``oe_embedder`` (LongCat).
- ``DEEPNVME_TABLES_MEMORY``: memory of each rank for rows of these tables. Default: 1 GiB.

Example::

    export DEEPNVME_OFFLOAD_DIR=/mnt/nvme DEEPNVME_OFFLOAD_MEMORY=8GB
    sglang serve --model-path MODEL --load-format deepnvme --disable-cuda-graph

    export DEEPNVME_TABLES=all DEEPNVME_TABLES_MEMORY=4GB
    sglang serve --model-path MODEL --load-format deepnvme --disable-cuda-graph
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deepnvme._utils.public import parse_bytes
from deepnvme.errors import InvalidArgumentError
from deepnvme.integrations._tables.settings import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepnvme.integrations._sglang.offloader import Offloader

__all__ = ["create_offloader", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)


DIR = "DEEPNVME_OFFLOAD_DIR"
MEMORY = "DEEPNVME_OFFLOAD_MEMORY"
PREFETCH_LAYERS = "DEEPNVME_OFFLOAD_PREFETCH_LAYERS"
_CREATE = "sglang.srt.utils.offloader.create_offloader"
_INITIALIZE = "sglang.srt.model_loader.loader._initialize_model"


def register() -> None:
    """Hook into SGLang for the variables that are set. SGLang calls this in its processes."""
    if os.environ.get(DIR):
        _register(_CREATE, create_offloader)
    if os.environ.get(TABLES):
        from deepnvme.integrations._sglang.tables import initialize_model  # noqa: PLC0415

        # The values are checked there: SGLang goes on without a plugin that fails here.
        _register(_INITIALIZE, initialize_model)


def _register(target: str, hook: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(target, hook, HookType.AROUND)


def create_offloader(original: Callable[[], Any]) -> Offloader:
    """Make the offloader that the environment describes.

    Args:
        original: SGLang's own function, which makes its offloader.

    Returns:
        deepnvme's offloader.

    Raises:
        ValueError: the folder, size or number in the environment is invalid, or SGLang's own offloading is enabled.
        OSError: the folder is not writable.
    """
    from sglang.srt.utils import offloader  # noqa: PLC0415

    from deepnvme.integrations._sglang.offloader import Offloader  # noqa: PLC0415
    from deepnvme.integrations._tables.weight import ids_of_tables  # noqa: PLC0415

    theirs = original()
    if type(theirs) is not offloader.NoopOffloader:
        msg = f"{DIR} is set, and SGLang's own offloading ({type(theirs).__name__}) is enabled; use only one of them"
        raise InvalidArgumentError(msg)
    folder = os.environ[DIR]
    if not os.path.isdir(folder):  # noqa: PTH112
        msg = f"{DIR} is {folder!r}, which is not a folder; use one on the disk to stream from"
        raise InvalidArgumentError(msg)
    memory = os.environ.get(MEMORY)
    return Offloader(
        folder,
        memory=None if memory is None else parse_bytes(memory, MEMORY),
        prefetch_layers=_count(os.environ.get(PREFETCH_LAYERS)),
        # SGLang knows which weights share memory with other tensors, or are used to compute them.
        is_resident=lambda layer: offloader._get_resident_parameter_ids(layer) | ids_of_tables(layer),  # noqa: SLF001
    )


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        msg = f"{PREFETCH_LAYERS} is {text!r}; it must be a number of layers"
        raise InvalidArgumentError(msg)
    return int(text)
