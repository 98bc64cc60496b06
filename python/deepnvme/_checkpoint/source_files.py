"""The files of a saved state, and loads whose files are replaced meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from deepnvme._deepnvme import StripeSet
from deepnvme.errors import ChecksumError, CorruptFileError, Error

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _Files = TypeVar("_Files")
    _Result = TypeVar("_Result")

# Times that a set of files may be replaced during one load.
_REPLACEMENTS_MAX = 100


class SourceFile(NamedTuple):
    """A file of the state to load."""

    path: Any
    names: list[str] | None = None
    """The tensors that an index lists for this file. ``None``: all."""
    fingerprint: tuple[int, int] | None = None
    """The file that the index means: its size, and the checksum of its own index."""


def stored_set(named: StripeSet) -> StripeSet:
    """Return the files of a stripe set now: a save to the set gives its parts new names, which the manifest lists."""
    try:
        return StripeSet.from_manifest(named.manifest_path)
    except FileNotFoundError:
        return named


def retry_if_replaced(name: object, find: Callable[[], _Files], work: Callable[[_Files], _Result]) -> _Result:
    """Run ``work`` on the files that an index lists. If the index is replaced meanwhile, run it on the new files.

    A save of several files removes the old ones once the new index is there. A reader of the old index then misses a
    file, or finds another under its name.
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
    msg = f"{name}: its files were replaced again and again during the load; load it again"
    raise Error(msg)
