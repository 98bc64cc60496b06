"""The ``with`` block of objects that have a ``close``."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class ClosesAtEnd:
    """The base of a class whose ``with`` block ends with ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Close the object."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise if no block may begin: the object was closed, or belongs to the parent of this forked process."""

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
