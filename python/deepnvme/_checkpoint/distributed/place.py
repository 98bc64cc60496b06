"""The place of a folder: equal for two processes if both see the same folder on the same machine."""

from __future__ import annotations

import socket
from pathlib import Path

# Different for each machine and each of its starts. Containers of one machine share it, and may share a host name.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Place = tuple[str, int, int]


def place_of(folder: Path) -> Place:
    """Return the machine, and the device and inode number of a folder.

    A host name and a path are not enough: machines may have the same name, and containers a disk of their own at the
    same path.
    """
    stat = folder.stat()
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return machine, stat.st_dev, stat.st_ino
