"""Sizes, counts and rounds of a run."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
PAGE_BYTES = 4096

# Copies of the large tensor that a run holds at its peak.
_COPIES_IN_MEMORY = (
    1  # the source
    + 1  # the tensor of the row
    + 2  # in the pinned memory of DeepSpeed's handle and of deepnvme's
    + 1  # the tensor that a tool makes
    + 1  # room to spare
    + 2  # fio's huge pages: see `buffer_bytes_max`
)
# Raw, numpy and torch files to read, the file being written, and room to spare.
_COPIES_ON_DISK = 6


@dataclass(frozen=True)
class Settings:
    """All settings that determine the duration of a run.

    Args:
        large_bytes: size of the one large tensor.
        sweep_bytes: size of the trial transfers that choose each tool's settings.
        small_count: number of small tensors, 4 to 64 KiB each.
        call_count: number of single 4 KiB calls in one round.
        in_flight_count: number of asynchronous 4 KiB reads in one round.
        rounds: measured rounds; one more, not counted, comes first and verifies every byte.
        fio_block_bytes, fio_depths: the grid of fio's sweep.
        finalists, final_trials: how many of a sweep's settings are tried again, and how often.
    """

    large_bytes: int = 2 * GIB
    sweep_bytes: int = GIB
    small_count: int = 10_000
    call_count: int = 2_000
    in_flight_count: int = 4_000
    rounds: int = 7
    fio_block_bytes: tuple[int, ...] = (256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
    fio_depths: tuple[int, ...] = (8, 16, 32, 64)
    finalists: int = 4
    final_trials: int = 4


def quick(rounds: int, large_bytes: int) -> Settings:
    """Return small settings for a smoke test; their speeds mean little."""
    return Settings(
        large_bytes=large_bytes,
        sweep_bytes=large_bytes,
        small_count=1_000,
        call_count=300,
        in_flight_count=500,
        rounds=rounds,
        fio_block_bytes=(512 << 10, 1 << 20),
        fio_depths=(16, 32),
        finalists=1,
        final_trials=1,
    )


def full(rounds: int, large_bytes: int) -> Settings:
    """Return the settings of a published run."""
    return Settings(large_bytes=large_bytes, sweep_bytes=large_bytes // 2, rounds=rounds)


def fitting_bytes(wanted: int, folder: Path) -> int:
    """Return `wanted`, or less if memory or disk is short, in whole multiples of 64 MiB.

    Raises:
        SystemExit: when not even 64 MiB fit.
    """
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable_bytes()
    disk = shutil.disk_usage(folder).free
    fitting = min(wanted, memory // _COPIES_IN_MEMORY, disk // _COPIES_ON_DISK)
    rounded = fitting // (64 * MIB) * (64 * MIB)
    if rounded == 0:
        raise SystemExit(
            f"{folder}: {memory // MIB} MiB of memory and {disk // MIB} MiB of disk are free; "
            f"free at least {64 * _COPIES_IN_MEMORY} MiB of memory and {64 * _COPIES_ON_DISK} MiB of disk",
        )
    return rounded


def _reclaimable_bytes() -> int:
    """Return the bytes that the page cache can release (MemAvailable less MemFree)."""
    fields = {}
    with open("/proc/meminfo", encoding="ascii") as meminfo:  # noqa: PTH123
        for line in meminfo:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
    return max(0, fields["MemAvailable"] - fields["MemFree"])
