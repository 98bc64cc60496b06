"""One fio job: its command line and its report.

fio runs in its own process. The metrics exclude its start, the filling of its buffers and, for a new file, creation
and preallocation. The wall time is the runtime that fio reports, including the final fsync. The CPU time is fio's
own user and system share of that runtime.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from common.measure import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_Setting = TypeVar("_Setting")
Engine = Literal["libaio", "io_uring", "io_uring-fixed", "psync"]


class FioFailed(RuntimeError):
    """fio failed, or its report does not match the job."""


@dataclass(frozen=True)
class FioSetting:
    """Engine, block size and depth of one job, and whether its buffers are in huge pages."""

    engine: Engine
    block_bytes: int
    depth: int
    huge: bool

    def __str__(self) -> str:
        memory = " iomem=mmaphuge" if self.huge else ""
        return f"{self.engine} bs={self.block_bytes >> 10}k iodepth={self.depth}{memory}"

    def arguments(self) -> list[str]:
        """Return fio's options for this setting."""
        chosen = [f"--bs={self.block_bytes}", f"--iodepth={self.depth}"]
        if self.huge:
            chosen.append("--iomem=mmaphuge")
        if self.engine == "io_uring-fixed":
            return [*chosen, "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"]
        return [*chosen, f"--ioengine={self.engine}"]


@cache
def version() -> str | None:
    """Return fio's version, or None if it is not installed."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True).stdout.strip()


def measure_settings(settings: Iterable[_Setting], speed: Callable[[_Setting], float]) -> dict[_Setting, float]:
    """Return the speed of each setting that runs here: containers may forbid an engine.

    Raises:
        FioFailed: no setting runs; the error of the last one.
    """
    speeds: dict[_Setting, float] = {}
    failure = FioFailed("no setting to try")
    for setting in settings:
        try:
            speeds[setting] = speed(setting)
        except FioFailed as error:
            failure = error
    if not speeds:
        raise failure
    return speeds


def fastest(speeds: dict[_Setting, float]) -> _Setting:
    """Return the setting with the highest speed."""
    return max(speeds, key=lambda setting: speeds[setting])


def transfer(setting: FioSetting, rw: Literal["read", "write"], path: Path, size: int) -> Sample:
    """Read or write the first `size` bytes of `path` in order, direct; writes end with an fsync."""
    arguments = [f"--rw={rw}", f"--size={size}"]
    if rw == "write":
        arguments.append("--end_fsync=1")
    report = _run(setting, arguments, path)
    # fio transfers whole blocks only and skips a remainder.
    return _sample(report, rw, size // setting.block_bytes * setting.block_bytes)


def random_reads(setting: FioSetting, path: Path, size: int, count: int) -> Sample:
    """Read `count` random blocks of the first `size` bytes of `path`, direct."""
    arguments = ["--rw=randread", f"--size={size}", f"--number_ios={count}", "--norandommap=1"]
    report = _run(setting, arguments, path)
    sample = _sample(report, "read", count * setting.block_bytes)
    percentile = report["read"]["clat_ns"]["percentile"]
    sample.extra["median_us"] = percentile["50.000000"] / 1e3
    sample.extra["p99_us"] = percentile["99.000000"] / 1e3
    return sample


def _run(setting: FioSetting, arguments: list[str], path: Path) -> dict[str, Any]:
    command = [
        "fio",
        "--name=transfer",
        f"--filename={path.name}",
        "--direct=1",
        "--output-format=json",
        *setting.arguments(),
        *arguments,
    ]
    done = subprocess.run(command, cwd=path.parent, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise FioFailed(f"fio {setting}: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}")
    # Warnings may precede the report on the same stream.
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job


def _sample(job: dict[str, Any], direction: str, size: int) -> Sample:
    side = job[direction]
    if job["error"] or side["io_bytes"] != size:
        raise FioFailed(f"fio {direction}: error {job['error']}, {side['io_bytes']} bytes instead of {size}")
    # fio reports whole milliseconds; a job shorter than one counts as one.
    wall_s = max(1, side["runtime"]) / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Sample(wall_s, cpu_s, size)
