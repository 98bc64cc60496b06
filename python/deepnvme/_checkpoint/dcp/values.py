"""Non-tensor values of a distributed checkpoint: unpickled safely, and set under the state's own keys.

torch's planners unpickle their input, and so run any code in it. They never get bytes of a file: its pickle goes
through the safe unpickler of ``deepnvme.load``, and the planner gets a new pickle of the resulting objects.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._checkpoint.load import load
from deepnvme._utils.interrupts import is_of_handler
from deepnvme.errors import CorruptFileError, Error, InvalidArgumentError, UnsafeFileError

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme._deepnvme import Engine


def repickle_safely(content: bytes | bytearray, path: Path, name: str, engine: Engine | None) -> io.BytesIO:
    """Unpickle a value without running code, and pickle it again.

    Raises:
        deepnvme.errors.UnsafeFileError: it asks for code.
        deepnvme.errors.CorruptFileError: it is not a pickle of ``torch.save``.
    """
    again = io.BytesIO()
    torch.save(_load(content, f"{path}: {name}", engine), again)
    again.seek(0)
    return again


def check_loadable(content: bytes | bytearray, name: str, engine: Engine | None) -> None:
    """Refuse a value that no load would return.

    A value of an unknown class passes: the user may allow the class later.

    Raises:
        deepnvme.errors.InvalidArgumentError: it is too large or too deep, for example.
    """
    try:
        _load(content, name, engine)
    except (UnsafeFileError, MemoryError):
        return
    except Error as error:
        msg = f"the state cannot be saved so that it could be loaded: {error}"
        raise InvalidArgumentError(msg) from error


def _load(content: bytes | bytearray, location: str, engine: Engine | None) -> Any:
    # `load` reads files only.
    descriptor = os.memfd_create("deepnvme-object", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:  # noqa: PTH123 (it is open already)
        file.write(content)
        file.flush()
        path = f"/proc/self/fd/{descriptor}"
        try:
            return load(path, verify="off", engine=engine, progress=False)
        except Error as error:
            named = type(error)(str(error).replace(path, location))
            named.filename, named.offset = location, error.offset
            raise named from None
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            if is_of_handler(error):
                raise
            raise CorruptFileError(f"{location}: {error}") from error


class OwnKeys:
    """Finds the places of a nested state by the paths of torch's planners.

    Such a path has each key as text. A plain value of key ``0`` would be set under ``"0"``, and the state would keep
    its old value under ``0``.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state
        # The keys of each dict that are not strings, by their strings: a search for each value would be quadratic.
        # The dict itself is held, since a later dict could get the id of one that is gone.
        self._keys: dict[int, tuple[Mapping[Any, Any], dict[str, Any]]] = {}

    def path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the path with the keys that the state has."""
        found: list[Any] = []
        container: Any = self._state
        for part in path:
            key = self._key(container, part) if isinstance(container, Mapping) else part
            found.append(key)
            try:
                container = container[key]
            except (KeyError, IndexError, TypeError):
                container = None
        return tuple(found)

    def set(self, path: tuple[Any, ...], value: Any) -> None:
        """Set a value at a path with the state's own keys."""
        element(self._state, path[:-1])[path[-1]] = value

    def _key(self, container: Mapping[Any, Any], text: Any) -> Any:
        if text in container:
            return text
        if (known := self._keys.get(id(container))) is None:
            keys = {str(key): key for key in container if not isinstance(key, str)}
            known = self._keys[id(container)] = container, keys
        return known[1].get(text, text)


def element(state: Any, path: tuple[Any, ...]) -> Any:
    """Return what is at a path."""
    for part in path:
        state = state[part]
    return state
