"""Files that a list names, when the list may be replaced while they are being read."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from deepnvme.errors import ChecksumError, CorruptFileError, Error

if TYPE_CHECKING:
    from collections.abc import Callable

_Files = TypeVar("_Files")
_Made = TypeVar("_Made")

# Times that a set of files may be replaced while it is being read.
_REPLACEMENTS_MAX = 100


def follow(name: object, find: Callable[[], _Files], work: Callable[[_Files], _Made]) -> _Made:
    """Work on the files that a list names; where it was replaced meanwhile, on those that it names now.

    A save of several files removes the old ones when the new list is there. Whoever has read the old list then misses
    one of them, or finds another in its place.
    """
    files = find()
    for _ in range(_REPLACEMENTS_MAX):
        try:
            return work(files)
        except (FileNotFoundError, CorruptFileError, ChecksumError):  # noqa: PERF203 (rarely more than once)
            now = find()
            if now == files:
                raise
            files = now
    msg = f"{name}: its files were replaced again and again while they were being read; load it again"
    raise Error(msg)
