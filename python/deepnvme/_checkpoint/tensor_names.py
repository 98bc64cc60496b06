"""The way to a tensor: keys, indices and attributes, joined by dots."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class NamePatterns:
    """Names, or patterns of names; what matches the beginning of a name up to a dot matches all below it."""

    def __init__(self, patterns: list[str]) -> None:
        # Only * and ? are special: names may well have brackets.
        plain = [escaped(pattern).replace("[", "[[]") for pattern in patterns]
        whole = [fnmatch.translate(pattern) for pattern in plain]
        below = [fnmatch.translate(pattern + ".*") for pattern in plain]
        self._regex = re.compile("|".join(whole + below) or r"(?!)")

    def matches(self, name: str) -> bool:
        """Whether any pattern matches the name."""
        return self._regex.match(name) is not None


def named_tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of nested dicts, lists and tuples, with their names."""
    import torch  # noqa: PLC0415

    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from named_tensors(value, _joined(name, key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from named_tensors(value, _joined(name, index))


def tensor_expressions(state: Any, way: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors as ``named_tensors`` gives them, with the way to each in the words of Python."""
    import torch  # noqa: PLC0415

    if isinstance(state, torch.Tensor):
        yield way, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensor_expressions(value, f"{way}[{key!r}]")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from tensor_expressions(value, f"{way}[{index}]")


def has_dtensors(state: object) -> bool:
    """Whether processes have parts of its tensors."""
    # Who has not imported the module has no tensor of it, and importing it takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for _, tensor in named_tensors(state))


def local_nbytes(state: object) -> int:
    """Give the bytes of tensors that this process has."""
    own = (getattr(tensor, "_local_tensor", tensor) for _, tensor in named_tensors(state))
    return sum(int(tensor.nbytes) for tensor in own)


def _joined(name: str, part: object) -> str:
    text = escaped(str(part))
    return f"{name}.{text}" if name else text


def escaped(text: str) -> str:
    """Write lone surrogates as escapes: a name is a text that can be printed, and sent to Rust."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
