"""fio's random reads and writes of one file, half and half by default."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.fio import Engine, FioFailed, FioSetting, fastest, measure_settings

if TYPE_CHECKING:
    from pathlib import Path

    from common.disk_idle import DiskIdleProbe

_BLOCK_BYTES = 1 << 20
ENGINES: tuple[Engine, ...] = ("io_uring", "libaio")
DEPTHS = (8, 16, 32, 64)
# Huge pages to reserve for fio: more than the buffers of its deepest queue.
HUGE_BYTES = 256 << 20


@dataclass(frozen=True)
class MixedJob:
    """One fio job of random reads and writes."""

    setting: FioSetting

    def __str__(self) -> str:
        return f"fio randrw {self.setting}"

    def run(self, path: Path, nbytes: int, *, read_percent: int = 50) -> float:
        """Read and write this many bytes of an existing file. Returns the bytes per second of both together.

        There is no sync at the end, as in the work that it is compared with.
        """
        command = [
            "fio",
            "--name=mixed",
            f"--filename={path}",
            "--rw=randrw",
            f"--rwmixread={read_percent}",
            "--direct=1",
            *self.setting.arguments(),
            f"--size={path.stat().st_size}",
            f"--io_size={nbytes}",
            "--output-format=json",
        ]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode != 0:
            raise FioFailed(f"{self}: exit {ended.returncode}: {(ended.stderr or ended.stdout).strip()[-400:]}")
        (job,) = json.loads(ended.stdout)["jobs"]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return float(moved / (job["job_runtime"] / 1000))


def lay_out(path: Path, nbytes: int) -> None:
    """Write the file once, so that no job finds holes."""
    command = [
        "fio",
        "--name=layout",
        f"--filename={path}",
        "--rw=write",
        "--bs=4M",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=16",
        f"--size={nbytes}",
        "--end_fsync=1",
        "--output-format=json",
    ]
    subprocess.run(command, check=True, capture_output=True)


def best_of_fio(
    path: Path, nbytes: int, disk: DiskIdleProbe, *, is_huge: bool
) -> tuple[MixedJob, dict[str, float]]:
    """Try some settings. Returns the best, and the speed of each that runs here.

    With `is_huge`, fio's buffers are in huge pages, like the swapper's memory.
    """
    lay_out(path, nbytes)

    def bytes_per_s(job: MixedJob) -> float:
        disk.wait()
        speed = job.run(path, nbytes // 2)
        print(f"{job}: {speed / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
        return speed

    settings = [FioSetting(engine, _BLOCK_BYTES, depth, is_huge) for engine in ENGINES for depth in DEPTHS]
    speeds = measure_settings(map(MixedJob, settings), bytes_per_s)
    return fastest(speeds), {str(job): speed for job, speed in speeds.items()}
