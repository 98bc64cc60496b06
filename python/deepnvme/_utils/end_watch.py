"""Notice that objects are gone, without Python code at that moment.

A callback of ``weakref.ref`` or a ``__del__`` in Python may run at any moment, and Python drops the exception of a
signal handler that interrupts it: Ctrl-C would do nothing. So only C code runs then, which notes the end.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

_Value = TypeVar("_Value")


class _Watched(weakref.ref[Any]):
    __slots__ = ("value",)
    value: Any


class EndWatch(Generic[_Value]):
    """Objects that are watched, each with a value. They may end in any thread.

    Args:
        forgets: whether nobody asks for those that have ended, as in a set.
    """

    def __init__(self, *, forgets: bool = False) -> None:
        self._forgets = forgets
        self._watched: dict[int, _Watched] = {}
        self._ended: deque[_Watched] = deque()

    def watch(self, item: object, value: _Value) -> None:
        """Watch an object that can have weak references."""
        if self._forgets:
            for _ in self.ended():
                pass
        reference = _Watched(item, self._ended.append)
        reference.value = value
        self._watched[id(reference)] = reference

    def ended(self) -> Iterator[_Value]:
        """Yield the values of objects that are gone, each once."""
        while self._ended:
            try:
                reference = self._ended.popleft()
            except IndexError:
                return  # another thread was faster
            self._watched.pop(id(reference), None)
            yield reference.value

    def living(self) -> list[Any]:
        """Return the objects that exist."""
        return [item for reference in list(self._watched.values()) if (item := reference()) is not None]
