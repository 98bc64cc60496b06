"""Copies parts of a checkpoint between the local disks of machines.

The lowest rank that has a file sends it in chunks. One process of each machine that lacks it writes it. All ranks take
part, even if they send and need nothing.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import deepnvme._file as file
from deepnvme._checkpoint.checkpoint import missing_part
from deepnvme._utils.metadata_file import open_regular
from deepnvme.errors import CorruptFileError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import BufferedReader
    from typing import Literal

    from deepnvme._checkpoint.checkpoint import Checkpoint, Part
    from deepnvme._checkpoint.distributed.process_group import RankGroup

T = TypeVar("T")

# Bytes of a file that each process holds in memory.
CHUNK_BYTES = 16 << 20
# Different for each machine and each of its starts. Containers of one machine share it, and may share a host name.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Equal for two processes if both see the same folder on the same machine.
Place = tuple[str, int, int]


def fetch(group: RankGroup, find: Callable[[], Checkpoint], durability: Literal["none", "data", "full"]) -> int:
    """Copy the missing parts of a checkpoint to this machine, on all ranks together. Returns the bytes copied."""
    found = _found_by_all(group, find)
    if group.is_single or not found.parts:
        return 0
    # The list of the parts, which rank 0 wrote and whose size is unknown, followed by the parts.
    paths = [found.path, *(found.path.with_name(part.file) for part in found.parts)]
    hosts = [found.parts[0].host, *(part.host for part in found.parts)]

    def look() -> tuple[Place, list[int | None]]:
        records: list[Part | None] = [None, *found.parts]
        return place_of(found.path.parent), [_size(*each) for each in zip(paths, records, strict=True)]

    gathered = group.run_on_all(look)
    place, _ = gathered[group.rank]
    fetched_nbytes = 0
    for number, path in enumerate(paths):
        sizes = [sizes[number] for _, sizes in gathered]
        senders = [rank for rank, size in enumerate(sizes) if size is not None]
        if not senders:
            # All ranks find the same, and raise the same error.
            raise missing_part(found, path.name, hosts[number])
        receivers = {place: rank for rank, (place, _) in reversed(list(enumerate(gathered))) if sizes[rank] is None}
        if receivers:
            nbytes = sizes[senders[0]] or 0
            receives = group.rank in receivers.values()
            _send(group, path, nbytes, (senders[0], receives), durability)
            if receives:
                _set_time(path, None if number == 0 else found.parts[number - 1].written_ns)
            fetched_nbytes += nbytes if place in receivers else 0
    return fetched_nbytes


def place_of(folder: Path) -> Place:
    """Return the machine, and the device and inode number of a folder.

    A host name and a path are not enough: machines may have the same name, and containers a disk of their own at the
    same path.
    """
    stat = folder.stat()
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return machine, stat.st_dev, stat.st_ino


def _found_by_all(group: RankGroup, find: Callable[[], Checkpoint]) -> Checkpoint:
    """Find the checkpoint. If a rank does not find it, or finds another one, all raise an error."""
    found: Checkpoint | None = None

    def look() -> str:
        nonlocal found
        found = find()
        return found.path.name

    names = group.run_on_all(look)
    assert found is not None
    for rank, name in enumerate(names):
        if name != names[0]:
            text = f"{group.name(rank)} fetches {name}, and {group.name(0)} {names[0]}"
            group.raise_on_all(f"{found.path.parent}: {text}; fetch the same step everywhere")
    return found


def _set_time(path: Path, written_ns: int | None) -> None:
    """Give a copy the time that the manifest records. With a later one it would count as changed, and never go."""
    if written_ns is not None:
        with suppress(OSError):
            os.utime(path, ns=(written_ns, written_ns))


def _size(path: Path, part: Part | None) -> int | None:
    """Return the size of a file that is present and, if it has a record, the one of the record."""
    with suppress(FileNotFoundError):
        if part is None or part.is_at(path):
            return path.stat().st_size
    return None


def _send(
    group: RankGroup, path: Path, nbytes: int, roles: tuple[int, bool], durability: Literal["none", "data", "full"]
) -> None:
    """Send a file from one rank to those that keep it. An error of one rank is raised on all."""
    import torch  # noqa: PLC0415

    sender, receives = roles
    chunk = bytearray(max(min(nbytes, CHUNK_BYTES), 1))
    bytes_, tensor = memoryview(chunk), torch.frombuffer(chunk, dtype=torch.uint8)
    files = ExitStack()
    with group.leave_on_error(), files:
        work = _Steps()
        # Not with `deepnvme.open`: it opens all parts when given their list.
        source = work.attempt(lambda: files.enter_context(open_regular(path))) if group.rank == sender else None
        existing = work.attempt(lambda: _open_existing(path, files)) if receives else None
        make = lambda: files.enter_context(file.open(path, "wb", durability=durability))  # noqa: E731
        target = work.attempt(make) if receives else None
        for begin in range(0, nbytes, CHUNK_BYTES):
            size = min(nbytes - begin, CHUNK_BYTES)
            if source is not None:
                work.attempt(partial(_fill, source, bytes_[:size], path))
            group.broadcast_tensor(tensor[:size], sender)
            if target is not None:
                work.attempt(partial(_compare, existing, bytes_[:size], path))
                work.attempt(partial(target.write, bytes_[:size]))
        work.attempt(partial(_compare, existing, bytes_[:0], path, is_end=True))
        group.run_on_all(work.check)
        group.run_on_all(files.pop_all().close)


def _fill(source: BufferedReader, chunk: memoryview, path: Path) -> None:
    if source.readinto(chunk) != len(chunk):
        msg = f"{path}: the file became shorter while it was read; another program writes to it"
        raise CorruptFileError(msg)


def _open_existing(path: Path, files: ExitStack) -> BufferedReader | None:
    """Open an existing file of that name."""
    try:
        return files.enter_context(open_regular(path))
    except FileNotFoundError:
        return None


def _compare(existing: BufferedReader | None, chunk: memoryview, path: Path, *, is_end: bool = False) -> None:
    """Refuse to replace anything except an incomplete copy of the same file."""
    if existing is not None:
        there = existing.read(1 if is_end else len(chunk))
        if there != chunk[: len(there)]:
            msg = f"{path}: another file has the name of this part; move it away"
            raise InvalidArgumentError(msg)


class _Steps:
    """The work of one rank. After an error it skips its work, and stays with the others until all may stop."""

    def __init__(self) -> None:
        self._failure: Exception | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do the work, unless an earlier step failed."""
        if self._failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 (it is raised later)
                self._failure = error
        return None

    def check(self) -> None:
        """Raise the first error."""
        if self._failure is not None:
            raise self._failure
