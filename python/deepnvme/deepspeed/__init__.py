"""DeepSpeed's DeepNVMe interface on the deepnvme engine: the same names, arguments and results.

Use it directly in place of DeepSpeed's ops::

    from deepnvme.deepspeed import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(block_size=1 << 20, queue_depth=32)

or make an installed DeepSpeed use it everywhere, with nothing to compile::

    import deepnvme.deepspeed

    deepnvme.deepspeed.install()
    import deepspeed

Bad input raises an exception where DeepSpeed's ops return -1, print a line or end the process. The ops need torch and
import it on first use. `install` and the builders do not, except `GDSBuilder.is_compatible`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._install import AsyncIOBuilder, GDSBuilder, PinMemoryBuilder, UtilsBuilder, install, uninstall

if TYPE_CHECKING:
    from .async_io import aio_handle, aio_read, aio_write, deepspeed_memcpy
    from .gds import gds_handle
    from .pin_memory import pin_handle
    from .utils import cast_to_byte_tensor

__all__ = [
    "AsyncIOBuilder",
    "GDSBuilder",
    "PinMemoryBuilder",
    "UtilsBuilder",
    "aio_handle",
    "aio_read",
    "aio_write",
    "cast_to_byte_tensor",
    "deepspeed_memcpy",
    "gds_handle",
    "install",
    "pin_handle",
    "uninstall",
]

# Every process of a DeepSpeed program calls `install`, even those without tensors, so torch is imported later.
_MODULES = {
    "aio_handle": "async_io",
    "aio_read": "async_io",
    "aio_write": "async_io",
    "cast_to_byte_tensor": "utils",
    "deepspeed_memcpy": "async_io",
    "gds_handle": "gds",
    "pin_handle": "pin_memory",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
