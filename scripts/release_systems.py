"""Systems for the tests of a wheel: containers, or a chroot with Debian for aarch64. Standard library only.

The chroot needs no docker. debootstrap fetches the packages into a folder, and dpkg-deb unpacks them. For the tests,
qemu runs the programs of the chroot in a user namespace with binfmt handlers of its own: the machine's settings stay
as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# This image has glibc 2.28, the oldest that the wheels support, for both architectures.
OLDEST_IMAGE = "python:3.10-slim-buster"
# The Python of this Debian, for which pip fetches packages.
SUITE, SUITE_PYTHON = "bookworm", "3.11"
PACKAGES = "python3,python3-venv,ca-certificates"
QEMU = "qemu-aarch64-static"
# The chroot needs these.
PROGRAMS = ("chroot", "debootstrap", "dpkg-deb", "mount", QEMU, "unshare")

# The start of an ELF file for aarch64, and the bits of it that count.
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
# Arguments: the folder of the chroot, the handler, the project, the folder of the wheels, the program.
_ENTER = """
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf %s "$2" >/proc/sys/fs/binfmt_misc/register
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mkdir -p "$1/project" "$1/dist"
mount --bind "$3" "$1/project"
mount --bind "$4" "$1/dist"
mount -o remount,bind,ro "$1/project"
mount -o remount,bind,ro "$1/dist"
exec chroot "$1" /usr/bin/env -i PATH=/usr/bin:/bin LC_ALL=C.UTF-8 sh -ec "$5"
"""


def docker_obstacle(platform: str) -> str | None:
    """Return why docker cannot run containers of this platform, or None."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "docker is installed, but its daemon does not answer"
    probe = ["docker", "run", "--rm", "--platform", platform, OLDEST_IMAGE, "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return f"docker cannot run {OLDEST_IMAGE} for {platform}; are qemu's binfmt handlers registered?"
    return None


def in_container(platform: str, project: Path, dist: Path, program: str) -> list[str | Path]:
    """Return the command that runs a program in the oldest supported system. The project is read-only there."""
    mounts: list[str | Path] = ["--volume", f"{project}:/project:ro", "--volume", f"{dist}:/dist:ro"]
    return ["docker", "run", "--rm", "--platform", platform, *mounts, OLDEST_IMAGE, "sh", "-ec", program]


def chroot_obstacle() -> str | None:
    """Return why this machine cannot run aarch64 without docker, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return None if os.geteuid() == 0 else "not root"


def fetch(folder: Path) -> list[str | Path]:
    """Return the command of debootstrap's first stage: it fetches the packages, and unpacks some."""
    what = ["--foreign", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}"]
    return ["debootstrap", *what, SUITE, folder]


def unpack(folder: Path) -> list[list[str | Path]]:
    """Return the commands that unpack all packages."""
    packages = sorted(folder.glob("var/cache/apt/archives/*.deb"))
    return [["dpkg-deb", "--extract", package, folder] for package in packages]


def in_chroot(folder: Path, project: Path, dist: Path, program: str) -> list[str | Path]:
    """Return the command that runs a program in a chroot. The project is read-only there."""
    handler = f":{QEMU}:M::{_MAGIC}:{_MASK}:{shutil.which(QEMU)}:F"
    namespaces = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    return ["unshare", *namespaces, "sh", "-ec", _ENTER, "sh", folder, handler, project, dist, program]
