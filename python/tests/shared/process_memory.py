"""The memory of this process as the kernel counts it, and the peak since a moment.

``ru_maxrss`` is not such a peak: a program starts with that of the process that started it, here of pytest.
"""

from __future__ import annotations

import inspect
from pathlib import Path


def memory_bytes(name: str) -> int:
    """Return a size in the process's status, such as ``VmRSS``, resident memory, or ``VmHWM``, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def restart_peak() -> int:
    """Return the resident memory now, from which the peak counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmHWM")


# For programs that tests run.
PROCESS_MEMORY = f"from pathlib import Path\n\n{inspect.getsource(memory_bytes)}\n{inspect.getsource(restart_peak)}"
