"""Make vLLM build embeddings whose tables stay on disk."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepnvme.integrations._tables.settings import TableSettings

_log = logging.getLogger(__name__)

# Name of a table -> the module that installs its classes.
_INSTALLERS = {
    "embed_tokens_per_layer": "vocab",
    "oe_embedder": "longcat",
    "ngram_embedding": "qwen4",
    "engram": "engram",
}


def install(settings: TableSettings) -> None:
    """Replace vLLM's classes for the tables that may stay on disk.

    A class that this version of vLLM does not have is left out: then no model has it.

    Args:
        settings: the tables.
    """
    # vLLM shows only what its own loggers say.
    ours, theirs = logging.getLogger("deepnvme"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers.extend(theirs.handlers)
        ours.setLevel(theirs.level)
    for name, module in _INSTALLERS.items():
        if name not in settings.names:
            continue
        try:
            installer = importlib.import_module(f"{__package__}.{module}")
        except ImportError as error:
            _log.info("deepnvme: this vLLM has no embedding for %s: %s", name, error)
            continue
        installer.install(settings)
