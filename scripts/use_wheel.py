"""Use the installed package, in an environment without torch. `release_check.py` runs this file with `-I`.

The last line of its output says what it ran on. Exit status 1 and a traceback if something does not work.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import deepnvme

# Neither a multiple of a disk's block nor of a page.
NBYTES = (3 << 20) + 77


def main() -> int:
    """Write and read a file, and run the report of the command. None of them needs another package."""
    assert importlib.util.find_spec("torch") is None, "torch is installed: this environment proves nothing"
    data = bytes(index * 7 % 251 for index in range(NBYTES))
    again = bytearray(NBYTES)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "bytes.bin")
        deepnvme.write(data, path, durability="full")
        deepnvme.read(again, path)
        assert bytes(again) == data, "other bytes were read than were written"
        report = reported(folder)
    version = importlib.metadata.version("deepnvme")
    assert report["version"] == version, f"the command reports version {report['version']}, the package {version}"
    chosen = [backend["name"] for backend in report["backends"] if backend["is_chosen"]]
    print(f"deepnvme {version}, Python {platform.python_version()}, {system()}, backend {', '.join(chosen)}")
    return 0


def reported(folder: str) -> dict[str, Any]:
    """Return the report of the installed command. A finding may end it with status 1; its output counts."""
    command = [str(Path(sysconfig.get_path("scripts")) / "deepnvme"), "report", "--json", folder]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if not ended.stdout:
        sys.exit(f"deepnvme report --json ended with {ended.returncode}: {ended.stderr}")
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


def system() -> str:
    """Return the CPU and the C library."""
    return f"{platform.machine()}, {' '.join(platform.libc_ver())}"


if __name__ == "__main__":
    sys.exit(main())
