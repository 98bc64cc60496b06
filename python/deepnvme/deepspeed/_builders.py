"""Op builders whose `load()` imports a module instead of compiling."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import ClassVar

from deepnvme._utils.public import public_in


class _Builder:
    """The interface of DeepSpeed's op builders. Nothing is built: the op is a module of this package."""

    BUILD_VAR: ClassVar[str]
    NAME: ClassVar[str]

    def __init__(self) -> None:
        self.name = self.NAME

    def absolute_name(self) -> str:
        """Return the name of the module that `load` returns."""
        return f"{__package__}.{self.NAME}"

    def is_compatible(self, verbose: bool = False) -> bool:  # noqa: ARG002 - DeepSpeed's signature
        """Whether the op works on this machine."""
        return sys.platform == "linux"

    def load(self, verbose: bool = False) -> ModuleType:  # noqa: ARG002 - DeepSpeed's signature
        """Import the op and return its module."""
        return importlib.import_module(self.absolute_name())


@public_in("deepnvme.deepspeed")
class AsyncIOBuilder(_Builder):
    """A builder that loads `aio_handle`, `aio_read`, `aio_write` and `deepspeed_memcpy`. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import AsyncIOBuilder
        >>> AsyncIOBuilder().load().__name__
        'deepnvme.deepspeed.async_io'
    """

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"


@public_in("deepnvme.deepspeed")
class PinMemoryBuilder(_Builder):
    """A builder that loads `pin_handle`. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import PinMemoryBuilder
        >>> PinMemoryBuilder().load().__name__
        'deepnvme.deepspeed.pin_memory'
    """

    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    NAME = "pin_memory"


@public_in("deepnvme.deepspeed")
class UtilsBuilder(_Builder):
    """A builder that loads `cast_to_byte_tensor`. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import UtilsBuilder
        >>> UtilsBuilder().load().__name__
        'deepnvme.deepspeed.utils'
    """

    BUILD_VAR = "DS_BUILD_UTILS"
    NAME = "utils"


@public_in("deepnvme.deepspeed")
class GDSBuilder(_Builder):
    """A builder that loads `gds_handle`, which also works without a GPU, for CPU tensors. `verbose` is ignored.

    Example:
        >>> from deepnvme.deepspeed import GDSBuilder
        >>> GDSBuilder().load().__name__
        'deepnvme.deepspeed.gds'
    """

    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether torch reaches an NVIDIA GPU. Imports torch."""
        if not super().is_compatible(verbose) or importlib.util.find_spec("torch") is None:
            return False
        torch = importlib.import_module("torch")
        return torch.version.hip is None and bool(torch.cuda.is_available())


BUILDERS: dict[str, type[_Builder]] = {
    builder.__name__: builder for builder in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder, UtilsBuilder)
}
