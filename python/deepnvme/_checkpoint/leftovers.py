"""What killed saves leave: private files that no living writer holds.

The next save of a name removes those of that name. Where names differ from save to save, nobody would come back for
them, and each is as large as a checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import re
    from pathlib import Path

MARK = ".deepnvme-tmp-"


def remove(path: Path) -> None:
    """Remove a file's name now, and give its room back on a thread of its own, which takes some file systems long.

    One that is not there is no error.
    """
    try:
        held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        path.unlink(missing_ok=True)
    finally:
        try:
            threading.Thread(target=os.close, args=(held,), name="deepnvme-release", daemon=True).start()
        except RuntimeError:
            # There are no more threads, or the program is about to end.
            os.close(held)


def remove_stale(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the private files and folders of targets of these names, but not those that are being written."""
    for path in list(folder.iterdir()):
        target, mark, _ = path.name.partition(MARK)
        # What vanishes meanwhile, or may not be opened, is somebody else's.
        if mark and target.startswith(".") and names.fullmatch(target[1:]):
            with suppress(OSError):
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    is_folder = path.is_dir()
    descriptor = os.open(path, (os.O_RDONLY if is_folder else os.O_RDWR) | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # A living writer holds the lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)
