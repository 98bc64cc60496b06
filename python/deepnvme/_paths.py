"""Paths as callers give them."""

from __future__ import annotations

import os
from pathlib import Path


def path_of(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """Make a path of whatever names a file.

    Raises:
        TypeError: it names none.
    """
    return Path(os.fsdecode(path))
