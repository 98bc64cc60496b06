"""Build models of transformers without their weights, and limit what the files of a model may ask of transformers.

``from_pretrained`` gets tensors that only know their position on disk. Names, fused weights, ties, dtypes and missing
weights are thus handled by the installed release of transformers.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._stream.model_files import ModelFiles
from deepnvme._stream.weight_origin import TracedTensor, UntraceableError
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.metadata_file import read_metadata
from deepnvme._utils.public import to_path, warn_caller
from deepnvme.errors import Error, NotFolderError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch
    from torch import nn

    from deepnvme._deepnvme import Engine

_PLACED_BY_OTHERS = "lets another library place or change the weights, which deepnvme.stream does itself"
_FROM_THE_FILES = "gives the model other weights than its files, which deepnvme.stream reads"
# Options that are refused unless None or false, with the reasons.
_REFUSED_OPTIONS = {
    **dict.fromkeys(
        ("device_map", "quantization_config", "tp_plan", "max_memory", "offload_folder"), _PLACED_BY_OTHERS
    ),
    **dict.fromkeys(("state_dict", "ignore_mismatched_sizes"), _FROM_THE_FILES),
    "output_loading_info": "returns more than the model",
}
# Names of models of the Hub, with or without an organisation.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Number of weights that an error lists.
_NAMES_SHOWN_MAX = 3
# Part of the error about a folder without a model.
_NO_WEIGHTS = "the folder has none of"
# The end of messages about a damaged config.
ORIGINAL_CONFIG = "take config.json from the original model"
_CONFIG_REMEDY = f"{ORIGINAL_CONFIG}, or update transformers"
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


def find_folder(model: str | bytes | os.PathLike[str], options: dict[str, Any]) -> Path:
    """Return the folder of a model: the argument, or that of a model of the Hub in the local cache.

    Args:
        model: a folder, or the name of a model of the Hub.
        options: passed to ``from_pretrained``. For a look-up in the cache, ``revision`` and ``cache_dir`` are used and
            removed.

    Raises:
        NotFoundError: there is no such folder, and the cache has no such model. The message says how to get it.
    """
    folder = to_path(model)
    name = os.fsdecode(model)
    if os.path.lexists(folder) or _HUB_NAME.fullmatch(name) is None:
        return folder
    revision, cache_dir = options.pop("revision", None), options.pop("cache_dir", None)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError:
        text = "no such folder; pip install huggingface_hub to find models of the Hub in its local cache"
        raise NotFoundError(errno.ENOENT, text, name) from None
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        model_text = "model of this name" if revision is None else f"revision {revision!r} of a model of this name"
        cache = "the local cache of the Hugging Face Hub" + ("" if cache_dir is None else f" in {cache_dir}")
        command = f"hf download {name}" + ("" if revision is None else f" --revision {revision}")
        command += "" if cache_dir is None else f" --cache-dir {os.fsdecode(cache_dir)}"
        text = (
            f"no such folder, and no {model_text} in {cache}; deepnvme.stream downloads nothing: run `{command}`, and "
            "pass the name again or the folder that this prints"
        )
        raise NotFoundError(errno.ENOENT, text, name) from None


def open_folder(
    model: str | os.PathLike[str], options: dict[str, Any], weights: Any, engine: Engine | None, verify: str
) -> tuple[Path, ModelFiles]:
    """Find the folder of a model, and open its weights or ``weights``."""
    folder = find_folder(model, options)
    if folder.is_file():
        remedy = "pass its folder, or a module and this file: stream(module, weights=file, memory=...)"
        raise NotFolderError(errno.ENOTDIR, f"this is a file, and a model is a folder; {remedy}", str(folder))
    try:
        return folder, ModelFiles(weights if weights is not None else folder, engine, verify)
    except NotFoundError as error:
        # The remedies of `load`, which takes a file, do not apply.
        is_other = _NO_WEIGHTS not in str(error) or "Checkpointer" in str(error)
        if weights is not None or is_other or not folder.is_dir():
            raise
        remedy = "download the weights into it, or pass a module and a file: stream(module, weights=file, memory=...)"
        raise NotFoundError(
            errno.ENOENT,
            f"the model folder has no weights (model.safetensors, or files with an index); {remedy}",
            str(folder),
        ) from error


def build_model(
    folder: Path, files: ModelFiles, dtype: str | torch.dtype, model_class: Any, options: dict[str, Any]
) -> nn.Module:
    """Build the model of a folder. Its parameters are :class:`TracedTensor`.

    Args:
        folder: the folder with ``config.json``.
        files: the weights.
        dtype: dtype of the model; ``"auto"`` takes the one of the config, or else of the files.
        model_class: a class of transformers that overrides the one in the config.
        options: passed to ``from_pretrained``, such as ``attn_implementation``.
    """
    import transformers  # noqa: PLC0415

    for name, reason in _REFUSED_OPTIONS.items():
        if options.pop(name, None):
            raise UnsupportedError(f"{name} {reason}; leave it out")
    config = options.pop("config", None) or folder
    if isinstance(config, (str, bytes, os.PathLike)):
        config = _read_config(transformers, to_path(config), bool(options.get("trust_remote_code")))
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{folder}: the weights are quantised by another library (quantization_config), whose layers cannot be "
            "streamed; take the original model and pack it with deepnvme pack --dtype int8"
        )
    chosen = _model_class(transformers, config, folder) if model_class is None else model_class
    if not _is_model_class(transformers, chosen):
        name = getattr(chosen, "__name__", repr(chosen))
        raise UnsupportedError(
            f"model_class is {name}, which is no model class of transformers; pass the class of the saved model, such "
            "as transformers.LlamaForCausalLM"
        )
    state = {name: TracedTensor(origin, weight_name=name) for name, origin in files.tensors.items()}
    if dtype == "auto":
        dtype = _dtype_of(config, files, folder)
    try:
        elements = sum(math.prod(origin.shape) for origin in files.tensors.values())
        with bounded_model(len(state), elements, folder / "config.json"):
            model, loaded = chosen.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                # Mismatches are refused below, with the file's shape and the model's.
                ignore_mismatched_sizes=True,
                **options,
            )
    except UntraceableError as error:
        raise UnsupportedError(
            f"{folder}: the file layout differs from the memory layout of {chosen.__name__} ({error}); load the model "
            "with transformers, save it with save_pretrained(), and stream the result"
        ) from error
    except Exception as error:
        if isinstance(error, Error | ImportError | MemoryError) or is_of_handler(error):
            raise
        # Values that config.json does not check, and options of other models, fail anywhere in the model's code.
        raise UnsupportedError(
            f"{folder}: transformers cannot build {chosen.__name__} from config.json and the options "
            f"({type(error).__name__}: {error}); {_CONFIG_REMEDY}, and check the options"
        ) from error
    _refuse_mismatched(folder, chosen, loaded["mismatched_keys"])
    _refuse_missing(folder, chosen, loaded["missing_keys"])
    model.config._name_or_path = str(folder)  # noqa: SLF001
    model.name_or_path = str(folder)
    _read_generation_config(transformers, model, folder)
    return model  # type: ignore[no-any-return]


def _read_config(transformers: Any, folder: Path, is_trusted: bool) -> Any:
    path = folder / "config.json"
    check_folder(folder)
    try:
        # Without an answer, transformers would ask for one on the terminal.
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
    except MemoryError:
        raise
    except Exception as error:
        if is_of_handler(error):
            raise
        if not os.path.lexists(path):
            remedy = "stream a folder written by save_pretrained(), or pass a module: stream(module, weights=...)"
            raise NotFoundError(errno.ENOENT, f"the model folder has no config.json; {remedy}", str(path)) from error
        raise UnsupportedError(f"{path}: transformers refuses it: {error}; {_CONFIG_REMEDY}") from error
    drop_foreign_implementations(config, path)
    return config


def _refuse_mismatched(folder: Path, chosen: Any, mismatched: Collection[tuple[str, Any, Any]]) -> None:
    if mismatched:
        name, stored, wanted = min(mismatched, key=lambda each: each[0])
        raise UnsupportedError(
            f"{folder}: {name} has shape {tuple(stored)} in the files, and {tuple(wanted)} in {chosen.__name__} as "
            "config.json describes it; the files are of another model, or damaged (deepnvme verify)"
        )


def _refuse_missing(folder: Path, chosen: Any, missing: Collection[str]) -> None:
    """Refuse missing weights. transformers would fill them with random numbers and only warn."""
    if not missing:
        return
    names = sorted(missing)
    more = f" and {len(names) - _NAMES_SHOWN_MAX} others" if len(names) > _NAMES_SHOWN_MAX else ""
    raise UnsupportedError(
        f"{folder}: the files lack weights of {chosen.__name__}: {', '.join(names[:_NAMES_SHOWN_MAX])}{more}; get "
        "the missing files, or pass the class of the saved model as model_class"
    )


def _is_model_class(transformers: Any, chosen: object) -> bool:
    """Whether it can build a model itself. The ``Auto`` classes choose another one, and read files for that."""
    return isinstance(chosen, type) and issubclass(chosen, transformers.PreTrainedModel)


def _model_class(transformers: Any, config: Any, folder: Path) -> Any:
    """Return the model class that the config names."""
    names = getattr(config, "architectures", None)
    listed = names if isinstance(names, list) else []
    for name in listed:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if _is_model_class(transformers, found):
            return found
    version = transformers.__version__
    wrong = f"{names!r} has no model class of transformers {version}" if names else "it is missing"
    raise UnsupportedError(
        f"{folder / 'config.json'}: architectures must name the model's class, but {wrong}; add a line such as "
        '"architectures": ["LlamaForCausalLM"], pass model_class=, or update transformers'
    )


def _dtype_of(config: Any, files: ModelFiles, folder: Path) -> torch.dtype:
    named = getattr(config, "dtype", None)
    if named is not None and not isinstance(named, str):
        return named  # type: ignore[no-any-return]
    floating = [origin.dtype for origin in files.tensors.values() if origin.dtype.is_floating_point]
    if not floating:
        raise UnsupportedError(f"{folder}: the files have no floating-point weights; pass dtype=...")
    return floating[0]


def _read_generation_config(transformers: Any, model: Any, folder: Path) -> None:
    if not model.can_generate() or not (folder / "generation_config.json").is_file():
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    except Exception as error:  # values that transformers does not check fail anywhere in its code
        if is_of_handler(error):
            raise
        warn_caller(f"{folder}/generation_config.json is ignored: {error}")


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
