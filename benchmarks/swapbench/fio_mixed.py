"""fio's random reads and writes of one file, half and half by default."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from storagebench.disk_idle import DiskIdleProbe

_BLOCK_BYTES = 1 << 20
ENGINES = ("io_uring", "libaio")
DEPTHS = (8, 16, 32, 64)
# Enough for the deepest queue and for the rest of fio.
HUGE_BYTES = 256 << 20


@dataclass(frozen=True)
class Mixed:
    """One fio job."""

    engine: str
    depth: int
    is_huge: bool
    """Whether its buffers lie in huge pages, as the swapper's memory does."""

    def __str__(self) -> str:
        memory = " iomem=mmaphuge" if self.is_huge else ""
        return f"fio randrw {self.engine} bs=1M iodepth={self.depth}{memory}"

    def run(self, path: Path, nbytes: int, *, read_percent: int = 50) -> float:
        """Read and write that many bytes of a file that is there; bytes in a second, of both together.

        Without a sync in the end, as what is compared with has none.
        """
        command = [
            "fio",
            "--name=mixed",
            f"--filename={path}",
            "--rw=randrw",
            f"--rwmixread={read_percent}",
            f"--bs={_BLOCK_BYTES}",
            "--direct=1",
            f"--ioengine={self.engine}",
            f"--iodepth={self.depth}",
            f"--size={path.stat().st_size}",
            f"--io_size={nbytes}",
            *(["--iomem=mmaphuge"] if self.is_huge else []),
            "--output-format=json",
        ]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
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


def best_of_fio(path: Path, nbytes: int, quiet: DiskIdleProbe, *, is_huge: bool) -> tuple[Mixed, dict[str, float]]:
    """Try some settings; the best, and how fast each was."""
    lay_out(path, nbytes)
    speeds: dict[Mixed, float] = {}
    for one in [Mixed(engine, depth, is_huge) for engine in ENGINES for depth in DEPTHS]:
        quiet.wait()
        speeds[one] = one.run(path, nbytes // 2)
        print(f"{one}: {speeds[one] / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
    return max(speeds, key=lambda one: speeds[one]), {str(one): speed for one, speed in speeds.items()}
