"""The folder of a distributed checkpoint: given when a reader or writer is made, or later as ``checkpoint_id``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._utils.public import to_absolute_path
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    import os
    from pathlib import Path


class CheckpointFolder:
    """A folder that is given to the constructor of ``owner``, or as ``checkpoint_id`` to ``function``."""

    def __init__(self, path: str | os.PathLike[str] | None, owner: str, function: str) -> None:
        self.given: Path | None = None
        self._owner, self._function = owner, function
        self.replace(path)

    @property
    def path(self) -> Path:
        """The absolute path."""
        if self.given is None:
            msg = f"no folder was given; pass a path to {self._owner}, or a checkpoint_id to {self._function}"
            raise InvalidArgumentError(msg)
        return self.given

    def replace(self, path: str | os.PathLike[str] | None) -> None:
        """Use another folder, if there is one."""
        if path is not None:
            self.given = to_absolute_path(path)
