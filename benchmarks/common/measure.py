"""One timed action: wall seconds, CPU seconds of all threads of the process, bytes."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

# The timed work: all preparation is done before the callable is made.
# It returns a Sample if another process measured itself (fio), else a value to verify.
Action = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Args:
        wall_s: seconds from call to return.
        cpu_s: user plus system seconds of every thread of the measured process.
        bytes_moved: bytes read or written.
        extra: further metrics of this row, such as ``median_us``.
    """

    wall_s: float
    cpu_s: float
    bytes_moved: int
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) per second."""
        return self.bytes_moved / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds for each gigabyte (10^9) transferred."""
        return self.cpu_s / (self.bytes_moved / 1e9)

    def to_json(self) -> dict[str, object]:
        """Return the sample as JSON-ready values."""
        values = asdict(self)
        extra = values.pop("extra")
        return {**values, **extra, "gb_per_s": self.gb_per_s, "cpu_s_per_gb": self.cpu_s_per_gb}


def timed(action: Action, bytes_moved: int) -> tuple[Sample, object]:
    """Run `action` once and return its sample and its value.

    Garbage collection is off meanwhile, for every tool alike: a collection that happens to fall into
    one tool's turn would be counted as its I/O.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        cpu_before = _cpu_seconds()
        start = time.perf_counter()
        value = action()
        wall_s = time.perf_counter() - start
        cpu_s = _cpu_seconds() - cpu_before
    finally:
        if was_enabled:
            gc.enable()
    if isinstance(value, Sample):
        return value, None
    return Sample(wall_s, cpu_s, bytes_moved), value


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
