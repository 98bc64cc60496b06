"""SGLang's load format ``deepnvme``: ``sglang serve --model-path MODEL --load-format deepnvme``.

The wheel registers this module in the entry-point group ``sglang.srt.plugins``. It changes nothing until the load
format is used. SGLang itself finds, downloads and filters the files, as for ``--load-format safetensors``.

Settings, in ``--model-loader-extra-config '{"prefetch_bytes": "1GB"}'``: ``prefetch_bytes``, the bytes that are read
ahead (default 512 MiB for each rank), and ``verify``, as for ``deepnvme.load``.

Example::

    sglang serve --model-path MODEL --load-format deepnvme --model-loader-extra-config '{"prefetch_bytes": "1GB"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepnvme.integrations._server_methods import with_globals
from deepnvme.integrations._server_settings import split_settings
from deepnvme.integrations._tables.loading import iterate_but_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

__all__ = ["LOAD_FORMAT", "loader_class", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)


LOAD_FORMAT = "deepnvme"
_VERIFY = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"


def register() -> None:
    """Register the load format ``deepnvme`` with SGLang.

    SGLang calls this in each process, before it parses its arguments.
    """
    from sglang.srt.arg_groups import choices  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    if LOAD_FORMAT not in choices.LOAD_FORMAT_CHOICES:
        choices.add_load_format_choices([LOAD_FORMAT])
        HookRegistry.register(_VERIFY, _verify_load_format, HookType.AROUND)


def _verify_load_format(original: Callable[[Any], None], config: Any) -> None:
    """Replace the name of the load format by the loader's class, which SGLang accepts."""
    if isinstance(config.load_format, str) and config.load_format.lower() == LOAD_FORMAT:
        config.load_format = loader_class()
    else:
        original(config)


def loader_class() -> Any:
    """Return the loader: a ``DefaultModelLoader`` that reads through deepnvme.

    Raises:
        ImportError: SGLang is not installed.
        RuntimeError: this version of SGLang reads in a way that deepnvme does not know; raised when a model is loaded.
    """
    import sglang  # noqa: PLC0415
    from sglang.srt.configs.load_config import LoadFormat  # noqa: PLC0415
    from sglang.srt.model_loader.loader import DefaultModelLoader  # noqa: PLC0415

    class DeepnvmeModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """SGLang's own loader, with another way to read."""

        def __init__(self, load_config: Any) -> None:
            self._settings, theirs = split_settings(load_config)
            theirs.load_format = LoadFormat.SAFETENSORS
            super().__init__(theirs)

        def _get_weights_iterator(self, source: Any, **prefetching: Any) -> Any:
            host = f"SGLang {sglang.__version__}"
            method = with_globals(
                DefaultModelLoader._get_weights_iterator,  # noqa: SLF001
                host,
                safetensors_weights_iterator=self._read,
                buffered_multi_thread_safetensors_weights_iterator=self._read,
            )
            return method(self, source, **prefetching)

        def _read(self, files: list[str], **_reading: Any) -> Iterator[tuple[str, torch.Tensor]]:
            # Keep SGLang's order: ranks may start with different files.
            return iterate_but_tables(files, **self._settings)

    return DeepnvmeModelLoader
