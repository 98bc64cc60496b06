"""Walks over nested states: dicts, lists and tuples, down to tensors.

Containers may stand in several places, and contain themselves. Each walk keeps the containers that it has seen: a
mapping may make its values at each access, and a new object could get the address of a freed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

# The keys and indices that lead to an object.
Keys: TypeAlias = tuple[object, ...]

# The same as in files: tensors below have no name there.
_DEPTH_MAX = 500
# Limit of walks into containers that were walked before. Forty lists, each of which contains the one before it twice,
# have a million million names.
_REVISITS_MAX = 1 << 19


def tensors_with_keys(state: Any) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Yield each tensor with the keys that lead to it, once for each way that does not pass a container twice.

    Raises:
        InvalidArgumentError: it is nested too deeply, or has too many ways to its tensors.
    """
    return _Walk().below(state, (), ())


def each_tensor(state: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor once."""
    import torch  # noqa: PLC0415

    return (found for _, found in each_with_keys(state) if isinstance(found, torch.Tensor))


def keys_of(state: Any, wanted: object) -> Keys | None:
    """Return keys that lead to an object, or ``None``."""
    return next((keys for keys, found in each_with_keys(state) if found is wanted), None)


def each_with_keys(state: Any) -> Iterator[tuple[Keys, object]]:
    """Yield each object once, with keys that lead to it."""
    seen: dict[int, object] = {}
    todo: list[tuple[Keys, object]] = [((), state)]
    while todo:
        keys, value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield keys, value
        todo += reversed([((*keys, key), below) for key, below in _contents(value) or ()])


def _contents(value: object) -> Iterable[tuple[object, object]] | None:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else None


class _Walk:
    def __init__(self) -> None:
        import torch  # noqa: PLC0415

        self._tensor = torch.Tensor
        # By id: the container, and whether it contains tensors.
        self._seen: dict[int, tuple[object, bool]] = {}
        self._revisits = 0
        # References to a container from within itself.
        self._loops = 0

    def below(self, value: object, keys: Keys, outer: tuple[int, ...]) -> Iterator[tuple[Keys, torch.Tensor]]:
        if isinstance(value, self._tensor):
            yield keys, value
            return
        contents = _contents(value)
        if contents is None:
            return
        if id(value) in outer:
            self._loops += 1
            return
        if (known := self._seen.get(id(value))) is not None:
            if not known[1]:
                return
            self._revisits += 1
            if self._revisits > _REVISITS_MAX:
                msg = f"the containers of the state refer to each other more than {_REVISITS_MAX} times"
                raise InvalidArgumentError(f"{msg}; its tensors have no end of names")
        if len(keys) >= _DEPTH_MAX:
            raise InvalidArgumentError("the objects of the state are nested too deeply to be saved and loaded again")
        has_tensors, loops = False, self._loops
        for key, part in contents:
            for found in self.below(part, (*keys, key), (*outer, id(value))):
                has_tensors = True
                yield found
        # What ended in a loop may go on from another place.
        self._seen[id(value)] = value, has_tensors or self._loops > loops
