"""The memory that this process can still get, and the errors if there is not enough."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from deepnvme.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

# A remedy leaves a quarter of the available memory to the rest of the program.
_REMEDY_FRACTION = 3 / 4
_MB, _GB = 10**6, 10**9


def check_available(nbytes: int, name: str = "memory") -> None:
    """Check that the machine has memory that will be allocated as a whole.

    Args:
        nbytes: the argument, in bytes.
        name: its name, for the message.

    Raises:
        OutOfMemoryError: it has less. The kernel might give the addresses, and end the process at their first use.
    """
    available = available_bytes()
    if available is not None and nbytes > available:
        raise refused(nbytes, available, name)


def refused(nbytes: int, available: int | None = None, name: str = "memory") -> OutOfMemoryError:
    """Describe memory that the machine does not have, with an amount that it has."""
    available = available_bytes() if available is None else available
    if available is None or nbytes <= available:
        return OutOfMemoryError(
            f"{name} is {nbytes:,} bytes, and the kernel refuses them; use less, or see `ulimit -v`"
        )
    amount = int(available * _REMEDY_FRACTION)
    text = f"{amount // _GB}GB" if amount >= 10 * _GB else f"{amount // _MB}MB"
    remedy = f"use {name}='{text}' or less" if amount >= _MB else "end other programs first"
    return OutOfMemoryError(f"{name} is {nbytes:,} bytes, and {available:,} are available on this machine; {remedy}")


@contextmanager
def memory_errors_with_path(name: str) -> Iterator[None]:
    """Raise failed allocations as ``OutOfMemoryError`` with the name of the file."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.filename is not None or name in str(error):
            raise
        raise OutOfMemoryError(f"{name}: {error}") from error
    except MemoryError as error:
        raise OutOfMemoryError(f"{name}: there is not enough memory for the file's objects") from error
    except BaseException as error:
        # If Python cannot allocate an object, the extension panics.
        if type(error).__name__ != "PanicException" or str(error) != "Python API call failed":
            raise
        raise OutOfMemoryError(f"{name}: there is not enough memory for the file's objects") from error


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can get without swapping or exceeding its container's limit.

    ``None`` if the system does not tell: a container may have no /proc.
    """
    return min([*_of_machine(root), *_of_cgroups(root)], default=None)


def _of_machine(root: Path) -> Iterator[int]:
    with suppress(OSError), (root / "proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process has left."""
    with suppress(OSError, ValueError):
        path = (root / "proc/self/cgroup").read_text().rpartition("0::")[2].strip().lstrip("/")
        groups = [*Path(path).parts]
        for depth in range(len(groups), -1, -1):
            group = root.joinpath("sys/fs/cgroup", *groups[:depth])
            # Groups without a limit have no number here. The kernel reclaims the cache of files.
            with suppress(OSError, ValueError):
                left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield max(left + int(counts.get("inactive_file", 0)), 0)
