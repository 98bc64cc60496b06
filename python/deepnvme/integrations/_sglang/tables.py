"""Make SGLang build embeddings whose tables stay on disk.

SGLang has no registry of layers. While it builds a model, and only then, the constructors of its embeddings are called
through functions of deepnvme, which build them without memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from deepnvme.errors import UnsupportedError
from deepnvme.integrations._tables.settings import TABLES, TableSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Name of a table -> SGLang's module with its class, and ours with the constructors.
_BUILDERS = {
    "embed_tokens_per_layer": ("sglang.srt.models.gemma3_causal", "gemma"),
    "oe_embedder": ("sglang.srt.layers.n_gram_embedding", "longcat"),
    "ngram_embedding": ("sglang.srt.models.qwen4_exp", "qwen4"),
    "engram": ("sglang.srt.layers.engram", "engram"),
}


def initialize_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a model, with the tables on disk that the environment names.

    Args:
        original: SGLang's own function, which builds the model.
        args: its arguments.
        kwargs: its arguments by name.

    Raises:
        ValueError: a variable of the environment has no valid value.
        UnsupportedError: a setting of SGLang cannot be combined with tables on disk.
    """
    settings = TableSettings.from_environment()
    _check_server()
    # SGLang has imported the modules of all its models by then; those that cannot be imported here have no model.
    from sglang.srt.models.registry import ModelRegistry  # noqa: F401, PLC0415

    builders = [
        importlib.import_module(f"{__package__}.{ours}")
        for name, (theirs, ours) in _BUILDERS.items()
        if name in settings.names and theirs in sys.modules
    ]
    with contextlib.ExitStack() as stack:
        for builder in builders:
            stack.enter_context(builder.building(settings))
        model = original(*args, **kwargs)
    for builder in builders:
        builder.finish(model)
    return model


@contextlib.contextmanager
def wrapped_methods(*hooks: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """Call functions in place of methods, or of functions of a module, meanwhile.

    Args:
        hooks: the class or module, the name, and a function that gets the original and its arguments.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, hook in hooks:
            original = getattr(owner, name)
            is_own = name in vars(owner)
            setattr(owner, name, _around(original, hook))
            stack.callback(setattr, owner, name, original) if is_own else stack.callback(delattr, owner, name)
        yield


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapped


def _check_server() -> None:
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415

    try:
        arguments = get_server_args()
    except (AttributeError, ValueError):
        # A model outside a server.
        return
    refused = {"enable_lora": "--enable-lora", "enable_memory_saver": "--enable-memory-saver"}
    enabled = [option for name, option in refused.items() if getattr(arguments, name, False)]
    if enabled:
        msg = f"{TABLES} is set, which cannot be combined with {' and '.join(enabled)}; leave one of them out"
        raise UnsupportedError(msg)
