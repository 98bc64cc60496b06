"""How fast the folders of a swap file are."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import default_engine
from deepnvme._utils.interrupts import is_of_handler
from deepnvme.errors import ClosedError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from deepnvme._deepnvme import Engine

# A fraction of a second on an NVMe drive.
_BYTES = 32 << 20


def measure(
    folders: Sequence[str | bytes | os.PathLike[str]], engine: Engine | None, check: Callable[[], object]
) -> tuple[float, float] | None:
    """Measure reads and writes in bytes a second, of all folders together. ``None`` if a folder cannot be written.

    ``check`` is called between transfers, and may raise.
    """
    total_read = total_write = 0.0
    used: Any = default_engine() if engine is None else engine
    data = torch.empty(_BYTES, dtype=torch.uint8).random_()
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                used.write(data, file.fileno())
                check()
                write_s = _seconds(lambda file=file: used.write(data, file.fileno(), 0, durability="data"))
                check()
                read_s = _seconds(lambda file=file: used.read(data, file.fileno()))
        except OSError as error:
            if is_of_handler(error) or isinstance(error, ClosedError):
                raise
            return None
        total_write += _BYTES / write_s
        total_read += _BYTES / read_s
    return total_read, total_write


def _seconds(act: Any) -> float:
    start = time.perf_counter()
    act()
    return max(time.perf_counter() - start, 1e-9)
