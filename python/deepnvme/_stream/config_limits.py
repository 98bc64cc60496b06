"""Limits on what a model's ``config.json`` may ask of transformers: no code of others, and no endless model."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.metadata_file import read_metadata
from deepnvme._utils.public import warn_caller
from deepnvme.errors import Error, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The end of messages about a damaged config.
ORIGINAL_CONFIG = "take config.json from the original model"
# The deepest published models have a few hundred layers. Some configs make a list with an entry for each.
LAYERS_MAX = 100_000
_COUNTS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers"})
# Modules that a model may have for each tensor of its files. One tensor may hold a layer's experts, each of which is
# several modules.
_MODULES_PER_TENSOR = 256
_MODULES_MIN = 1000
# Elements that a model may register for each one of its files: tied weights are made several times, and filled again.
_ELEMENTS_PER_ELEMENT = 16
_ELEMENTS_MIN = 1 << 24
# Far more than the largest tokenizer has. Their readers take several times the memory of a file.
_FILE_BYTES_MAX = 256 << 20
# Implementations of attention and of experts that transformers and torch have themselves.
_OWN_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")


def check_folder(folder: Path) -> None:
    """Refuse a model folder whose text files are too large to read, or whose config has more layers than any model."""
    for entry in _texts(folder):
        nbytes = entry.stat().st_size
        if nbytes > _FILE_BYTES_MAX:
            raise UnsupportedError(
                f"{entry.path}: it has {nbytes} bytes, and a model's text files have at most {_FILE_BYTES_MAX}; take "
                "that of the original model"
            )
    _check_layers(folder / "config.json")


def drop_foreign_implementations(config: Any, path: Path) -> None:
    """Ignore implementations from the Hub that the file names. Options of the caller still apply."""
    configs, seen = [config], set()
    while configs:
        current = configs.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for value in vars(current).values():
            found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
            configs.extend(each for each in found if hasattr(each, "model_type") and hasattr(each, "__dict__"))
        for name in ("_attn_implementation", "_experts_implementation"):
            chosen = getattr(current, name, None)
            if chosen is not None and chosen not in _OWN_IMPLEMENTATIONS:
                setattr(current, name, None)
                option = name.removeprefix("_")
                warn_caller(
                    f"{path}: its choice of {option} ({chosen!r}) is ignored, because it may be code of others; if you "
                    f"trust that, pass {option}={chosen!r} to deepnvme.stream"
                )


@contextmanager
def bounded_model(tensors: int, elements: int, path: Path) -> Iterator[None]:
    """Stop a model that this thread builds once it has far more modules or weights than the files.

    Args:
        tensors: the number of tensors in the files.
        elements: the number of their elements.
        path: the config, for errors.
    """
    from torch.nn.modules import module as hooks  # noqa: PLC0415

    modules_left = _MODULES_MIN + tensors * _MODULES_PER_TENSOR
    elements_left = _ELEMENTS_MIN + elements * _ELEMENTS_PER_ELEMENT
    thread = threading.get_ident()

    def count_module(*_: object) -> None:
        nonlocal modules_left
        if threading.get_ident() == thread:
            modules_left -= 1
            if modules_left < 0:
                raise UnsupportedError(
                    f"{path}: it describes a model with far more layers than the {tensors} tensors of the files are "
                    f"for; {ORIGINAL_CONFIG}"
                )

    def count_elements(_: object, __: str, parameter: Any) -> None:
        nonlocal elements_left
        if threading.get_ident() == thread and parameter is not None:
            elements_left -= parameter.numel()
            if elements_left < 0:
                raise UnsupportedError(
                    f"{path}: it describes a model with far more weights than the {elements} of the files; "
                    f"{ORIGINAL_CONFIG}"
                )

    handles = [
        hooks.register_module_module_registration_hook(count_module),
        hooks.register_module_parameter_registration_hook(count_elements),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _texts(folder: Path) -> list[os.DirEntry[str]]:
    """Return the files that transformers may read as text.

    A folder that is missing is left to transformers, whose errors say more.

    Raises:
        OSError: the folder cannot be listed. Its files may be of any size.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry for entry in entries if entry.name.endswith((".json", ".jinja", ".txt", ".model"))]
            return [entry for entry in names if not entry.name.endswith(".index.json") and entry.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _check_layers(path: Path) -> None:
    """Refuse a ``config.json`` with a number of layers that no model has.

    A file that is missing, or no JSON, is left to transformers, whose errors say more.
    """
    try:
        values = [json.loads(read_metadata(path))]
    except (Error, ValueError, RecursionError) as error:
        if is_of_handler(error):
            raise
        return
    while values:
        value = values.pop()
        if isinstance(value, list):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend(value.values())
            for name, number in value.items():
                # Not `vocab_size_per_layer_input`, for example.
                if not name.endswith(("layers", "n_layer")) or not isinstance(number, int):
                    continue
                # Negative numbers of other names mean "none", or count from the last layer.
                if number > LAYERS_MAX or (number < 0 and name in _COUNTS):
                    raise UnsupportedError(
                        f"{path}: {name} is {number}, and deepnvme.stream builds at most {LAYERS_MAX} layers; the file "
                        "is damaged or hostile: take config.json from the original model"
                    )
