"""The way to a tensor: keys, indices and attributes, joined by dots."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Patterns:
    """Names, or patterns of names; what matches the beginning of a name up to a dot matches all below it."""

    def __init__(self, patterns: list[str]) -> None:
        # Only * and ? are special: names may well have brackets.
        escaped = [pattern.replace("[", "[[]") for pattern in patterns]
        whole = [fnmatch.translate(pattern) for pattern in escaped]
        below = [fnmatch.translate(pattern + ".*") for pattern in escaped]
        self._regex = re.compile("|".join(whole + below) or r"(?!)")

    def matches(self, name: str) -> bool:
        """Whether any pattern matches the name."""
        return self._regex.match(name) is not None


def tensors_of(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of nested dicts, lists and tuples, with their names."""
    import torch  # noqa: PLC0415

    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors_of(value, _joined(name, key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from tensors_of(value, _joined(name, index))


def _joined(name: str, part: object) -> str:
    return f"{name}.{part}" if name else str(part)
