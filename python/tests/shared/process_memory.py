"""The peak of a process's resident memory since a moment.

``ru_maxrss`` is no measure of it: a program starts with that of the process that started it, here of pytest.
"""

from __future__ import annotations

import inspect
from pathlib import Path


def resident_bytes(name: str) -> int:
    """Return a size that the kernel reports, such as ``VmHWM``, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def restart_peak() -> int:
    """Return the resident memory now, from which the peak counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmHWM")


# For programs that tests run.
PEAK_MEMORY = f"from pathlib import Path\n\n{inspect.getsource(resident_bytes)}\n{inspect.getsource(restart_peak)}"
