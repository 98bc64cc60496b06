"""Kernel, CPU, disk and versions, without anything that identifies the machine."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

from common import cache, fio

_PACKAGES = (
    "deepnvme",
    "torch",
    "numpy",
    "accelerate",
    "deepspeed",
    "kvikio-cu13",
    "kvikio-cu12",
    "safetensors",
    "transformers",
    "fastsafetensors",
    "runai-model-streamer",
)


#: Mount options that say how the file system works. Others may identify the machine: ``addr=``, ``lowerdir=``.
_HARMLESS_OPTIONS = frozenset(
    {
        "rw",
        "ro",
        "noatime",
        "relatime",
        "nodiratime",
        "lazytime",
        "sync",
        "dax",
        "discard",
        "nodiscard",
        "nobarrier",
        "barrier",
        "commit",
        "data",
        "delalloc",
        "nodelalloc",
        "stripe",
        "attr2",
        "inode64",
        "logbufs",
        "logbsize",
        "sunit",
        "swidth",
        "noquota",
        "ssd",
        "space_cache",
        "compress",
        "datacow",
        "nodatacow",
        "nodatasum",
    }
)


def describe(folder: Path) -> dict[str, object]:
    """Return the environment for a record."""
    return {
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "memlock_limit_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "python": platform.python_version(),
        "disk": _disk(folder),
        "cache_dropped_by": cache.drop_method(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    versions = {"fio": fio.version() or "not installed"}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _disk(folder: Path) -> dict[str, object]:
    """Describe the file system and the block device below `folder`, without its path."""
    described = subprocess.run(
        ["findmnt", "--noheadings", "--raw", "--output", "FSTYPE,OPTIONS", "--target", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    ).stdout.split()
    disk: dict[str, object] = dict(zip(("file_system", "mount_options"), described, strict=False))
    disk["mount_options"] = _harmless(str(disk.get("mount_options", "")))
    device = os.stat(folder).st_dev  # noqa: PTH116 - the number of the device is all that is wanted
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not block.exists():
        return disk
    whole = block.resolve()
    if (whole / "partition").exists():
        whole = whole.parent
    disk["driver"] = _driver(whole)
    for name in ("rotational", "nr_requests", "max_sectors_kb", "max_segments", "write_cache"):
        value = whole / "queue" / name
        if value.exists():
            disk[name] = value.read_text(encoding="ascii").strip()
    disk["scheduler"] = _chosen(whole / "queue" / "scheduler")
    model = whole / "device" / "model"
    if model.exists():
        disk["model"] = model.read_text(encoding="ascii").strip()
    return disk


def _harmless(options: str) -> str:
    """Return the mount options that identify no machine."""
    return ",".join(option for option in options.split(",") if option.partition("=")[0] in _HARMLESS_OPTIONS)


def _driver(block: Path) -> str:
    driver = block / "device" / "driver"
    if driver.exists():
        return driver.resolve().name
    return "nvme" if block.name.startswith("nvme") else block.name.rstrip("0123456789")


def _chosen(path: Path) -> str:
    """Return the word in brackets of a sysfs choice, or all of it."""
    if not path.exists():
        return "unknown"
    text = path.read_text(encoding="ascii").strip()
    return text.partition("[")[2].partition("]")[0] or text
