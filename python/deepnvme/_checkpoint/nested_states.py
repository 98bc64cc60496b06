"""Walks over nested states (dicts, lists and tuples): tensors and their names, and the values that are no tensors.

Containers may stand in several places, and contain themselves. Each walk keeps the containers that it has seen: a
mapping may make its values at each access, and a new object could get the address of a freed one.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import torch

from deepnvme._utils.shards import is_dtensor, local
from deepnvme.errors import InvalidArgumentError

# The keys and indices that lead to an object.
Keys: TypeAlias = tuple[object, ...]

# The same as in files: tensors below have no name there.
DEPTH_MAX = 500
# Limit of walks into containers that were walked before. Forty lists, each of which contains the one before it twice,
# have a million million names.
_REVISITS_MAX = 1 << 19
_MISSING = object()


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


def find_keys(state: Any, wanted: object) -> Keys | None:
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


class NamePatterns:
    """Names or patterns of names. A pattern that matches a name up to a dot matches all names below it."""

    def __init__(self, patterns: list[str]) -> None:
        self._unmatched = dict.fromkeys(patterns)
        # Looked up, since there may be as many as the file has tensors.
        self._names: dict[str, str] = {}
        self._regexes: list[tuple[str, re.Pattern[str]]] = []
        for pattern in patterns:
            text = escaped(pattern)
            if "*" not in text and "?" not in text:
                self._names[text] = pattern
                continue
            # Only * and ? are special: names may contain brackets.
            glob = text.replace("[", "[[]")
            regex = f"{fnmatch.translate(glob)}|{fnmatch.translate(glob + '.*')}"
            self._regexes.append((pattern, re.compile(regex)))

    def matches(self, name: str) -> bool:
        """Whether any pattern matches the name."""
        matching = [self._names[part] for part in names_above(name) if part in self._names] if self._names else []
        matching += [pattern for pattern, regex in self._regexes if regex.match(name)]
        for pattern in matching:
            self._unmatched.pop(pattern, None)
        return bool(matching)

    @property
    def unmatched(self) -> list[str]:
        """The patterns that have matched no name so far."""
        return [*self._unmatched]


def named_tensors(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dicts, lists and tuples, with their names."""
    for keys, tensor in tensors_with_keys(state):
        yield name_of(keys), tensor


def name_of(keys: Keys) -> str:
    """Return the name of what keys and indices lead to."""
    return functools.reduce(_joined, keys, "")


def names_above(name: str) -> Iterator[str]:
    """Yield the name, and its parts up to each dot."""
    yield name
    at = name.rfind(".")
    while at >= 0:
        yield name[:at]
        at = name.rfind(".", 0, at)


def tensor_expressions(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor, as :func:`named_tensors` does, with its Python expression, such as ``['a'][0]``."""
    for keys, tensor in tensors_with_keys(state):
        yield expression(keys), tensor


def expression(keys: Keys) -> str:
    """Return the Python expression of keys, such as ``['a'][0]``."""
    return "".join(f"[{key!r}]" for key in keys)


def tensor_keys(state: Any) -> Iterator[object]:
    """Yield the keys of all dicts, and the indices, on the way to tensors."""
    for keys, _ in tensors_with_keys(state):
        yield from keys


def has_name(key: object) -> bool:
    """Whether the key has a name in a file, as the readers of files see it."""
    return key is None or isinstance(key, str | bool) or (type(key) is int and -(1 << 63) <= key < 1 << 63)


def has_dtensors(state: object) -> bool:
    """Whether a state contains DTensors, of which each process has a part."""
    return any(map(is_dtensor, each_tensor(state)))


def local_nbytes(state: object) -> int:
    """Return the bytes of tensors in this process; of DTensors, those of its own part."""
    own = map(local, each_tensor(state))
    # torch has no size of sparse and nested ones.
    return sum(int(tensor.nbytes) for tensor in own if str(tensor.layout) == "torch.strided" and not tensor.is_nested)


def escaped(text: str) -> str:
    """Escape lone surrogates, so that a name can be printed and passed to Rust."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _joined(name: str, part: object) -> str:
    text = escaped(str(part))
    return f"{name}.{text}" if name else text


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
        if len(keys) >= DEPTH_MAX:
            msg = "the objects of the state are nested too deeply to be saved and loaded again"
            raise InvalidArgumentError(f"{msg}; files have at most {DEPTH_MAX} levels")
        has_tensors, loops = False, self._loops
        for key, part in contents:
            for found in self.below(part, (*keys, key), (*outer, id(value))):
                has_tensors = True
                yield found
        # What ended in a loop may go on from another place.
        self._seen[id(value)] = value, has_tensors or self._loops > loops


def has_values(state: Any) -> bool:
    """Whether a state contains anything but tensors, and containers of them."""
    return any(not isinstance(found, torch.Tensor | Mapping | list | tuple) for _, found in each_with_keys(state))


def empty_containers(state: Any) -> list[Keys]:
    """Return the keys of containers that contain nothing."""
    return [keys for keys, found in each_with_keys(state) if isinstance(found, Mapping | list | tuple) and not found]


class Replacements:
    """The values of ``into`` that differ from those that ``saved`` has at the same keys. Tensors stay.

    Raises:
        InvalidArgumentError: a container occurs twice in ``into``, and the file has different values for it.
    """

    def __init__(self, into: Any, saved: Any) -> None:
        self.lacking: list[Keys] = []
        """Values that ``saved`` has none for."""
        self.fixed: list[Keys] = []
        """Values in containers that cannot change, such as a tuple with tensors."""
        # By container and key: the container, the key, the new value, and the keys that lead there.
        self._new: dict[tuple[int, Any], tuple[Any, Any, Any, Keys]] = {}
        # Pairs of containers that were compared. They are kept, so that no id is used again.
        self._seen: dict[tuple[int, int], tuple[object, object]] = {}
        self._compare(into, saved, ())

    def apply(self) -> None:
        """Replace the values. Dicts and lists are changed in place."""
        for container, key, value, _ in self._new.values():
            container[key] = value

    def _compare(self, into: Any, saved: Any, keys: Keys) -> None:
        if (id(into), id(saved)) in self._seen:
            return
        self._seen[id(into), id(saved)] = into, saved
        for key, value in [*into.items()] if isinstance(into, Mapping) else [*enumerate(into)]:
            if isinstance(value, torch.Tensor):
                continue
            new, here = _at(saved, key), (*keys, key)
            if _is_container(value) and (_has_tensors(value) or _are_alike(value, new)):
                self._compare(value, new, here)
            elif new is _MISSING or _has_tensors(new):
                self.lacking.append(here)
            elif isinstance(into, MutableMapping | list):
                self._note(into, key, new, here)
            elif not _are_equal(value, new):
                self.fixed.append(here)

    def _note(self, into: Any, key: Any, new: Any, here: Keys) -> None:
        known = self._new.setdefault((id(into), key), (into, key, new, here))
        if not _are_equal(known[2], new):
            msg = f"into{expression(known[3])} and into{expression(here)} are in one container, and the file has"
            raise InvalidArgumentError(f"{msg} different values for them; give each a container of its own")


def refuse_lost(checkpoint: str, empty: list[Keys], lacking: list[Keys], names: Iterable[str]) -> None:
    """Refuse parts of ``into`` without tensors, if the checkpoint has tensors there: they would be lost.

    Args:
        checkpoint: its path, for the message.
        empty: empty containers.
        lacking: values that the checkpoint has none for.
        names: the names of its tensors.
    """
    words = {name_of(keys): (keys, "is no tensor") for keys in lacking}
    words |= {name_of(keys): (keys, "is empty") for keys in empty}
    for name in names:
        found = next((words[part] for part in ("", *names_above(name)) if part in words), None)
        if found is None:
            continue
        keys, word = found
        msg = (
            f"{checkpoint}: into{expression(keys)} {word}, and the checkpoint has tensors there, such as {name}, which "
            "would be lost; load without into, fill it first (an optimizer's state exists from its first step on, or "
            "from get_state_dict of torch.distributed.checkpoint.state_dict), or leave the key out"
        )
        raise InvalidArgumentError(msg)


def _at(saved: Any, key: Any) -> Any:
    if isinstance(saved, Mapping):
        return saved.get(key, _MISSING)
    is_index = isinstance(saved, list | tuple) and type(key) is int and key < len(saved)
    return saved[key] if is_index else _MISSING


def _are_alike(value: Any, new: Any) -> bool:
    """Whether both are dicts, or lists of one length. An empty container asks for the whole other."""
    if isinstance(value, Mapping) and isinstance(new, Mapping):
        return bool(value)
    return isinstance(value, list) and isinstance(new, list) and len(value) == len(new) > 0


def _are_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _has_tensors(value: Any) -> bool:
    return next(each_tensor(value), None) is not None


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)
