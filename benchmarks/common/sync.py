"""Brings files and folders to the disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def sync(path: Path) -> None:
    """Sync a file, or a folder with all files and folders in it, and its name."""
    inside = [one for one in path.rglob("*") if one.is_file() or one.is_dir()] if path.is_dir() else []
    for one in [*inside, path, path.parent]:
        fsync(one)


def fsync(path: Path) -> None:
    """Sync the bytes of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
