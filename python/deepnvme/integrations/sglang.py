"""SGLang with models larger than memory: the weights of the layers stream from NVMe, layer by layer.

The wheel registers this module in the entry-point group ``sglang.srt.plugins``. It changes nothing until the
environment sets ``DEEPNVME_OFFLOAD_DIR``. Then deepnvme's offloader replaces SGLang's own in each process, so that
every rank has its own file with the weights that it needs.

- ``DEEPNVME_OFFLOAD_DIR``: a folder on the disk to stream from, with space for the weights. Its files have no names,
  and vanish with their processes.
- ``DEEPNVME_OFFLOAD_MEMORY``: memory of each rank for streamed weights, on the device of the model; ``"4GB"``.
  Default: three times the largest layer.
- ``DEEPNVME_OFFLOAD_PREFETCH_LAYERS``: layers to read ahead. Default: 2, if they fit.

Example::

    export DEEPNVME_OFFLOAD_DIR=/mnt/nvme DEEPNVME_OFFLOAD_MEMORY=8GB
    sglang serve --model-path MODEL --load-format deepnvme --disable-cuda-graph
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deepnvme._utils.public import parse_bytes
from deepnvme.errors import InvalidArgumentError

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


def register() -> None:
    """Make SGLang use deepnvme's offloader if ``DEEPNVME_OFFLOAD_DIR`` is set. SGLang calls this in its processes."""
    if not os.environ.get(DIR):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(_CREATE, create_offloader, HookType.AROUND)


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
        is_resident=offloader._get_resident_parameter_ids,  # noqa: SLF001
    )


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        msg = f"{PREFETCH_LAYERS} is {text!r}; it must be a number of layers"
        raise InvalidArgumentError(msg)
    return int(text)
