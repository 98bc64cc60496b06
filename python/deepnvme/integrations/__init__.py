"""Support for checkpoints of other libraries, and for model servers.

Each module imports the library that it is for, and is imported on first use:

- ``dcp``: a storage writer and reader for ``torch.distributed.checkpoint``.
- ``deepspeed``, ``lightning``, ``transformers``: the checkpoints of these libraries.
- ``sglang``, ``sglang_loader``, ``vllm``: plugins of model servers.
- ``weights``: the weights of a model, one after the other.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepnvme.integrations import dcp as dcp
    from deepnvme.integrations import deepspeed as deepspeed
    from deepnvme.integrations import lightning as lightning
    from deepnvme.integrations import sglang as sglang
    from deepnvme.integrations import sglang_loader as sglang_loader
    from deepnvme.integrations import transformers as transformers
    from deepnvme.integrations import vllm as vllm
    from deepnvme.integrations import weights as weights

# `import *` imports no module: some need libraries that are not installed.
__all__: list[str] = []

_MODULES = ("dcp", "deepspeed", "lightning", "sglang", "sglang_loader", "transformers", "vllm", "weights")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError as error:
        # `hasattr` and `help` expect this. The `import` statement raises the original error.
        msg = f"{__name__}.{name} cannot be imported: {error}"
        raise AttributeError(msg) from error


def __dir__() -> list[str]:
    return sorted(_MODULES)
