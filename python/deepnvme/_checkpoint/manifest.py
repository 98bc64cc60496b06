"""The list of checkpoints in a folder: what counts, and what is left of a crash."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepnvme._file as file
from deepnvme._checkpoint.leftovers import MARK, remove, remove_stale
from deepnvme._deepnvme import _crc64
from deepnvme.errors import ChecksumError, CorruptFileError, NotFoundError

if TYPE_CHECKING:
    from typing import Literal

NAME = "manifest.json"
_VERSION = 1
# What lists the parts of a checkpoint that is in several files.
PARTS_LIST = ".stripes.json"
# What a sharded checkpoint's folder has when it is whole.
SHARDS_LIST = "deepnvme.json"
# What checkpoints are called: nothing else in the folder is ever removed. Those without a suffix are folders.
_FILES = re.compile(r"step-[0-9]{8,}(-[0-9]+)?(\.(pt|safetensors)(\.stripes\.json|\.part-[0-9]{2,}-of-[0-9]{2,})?)?")


def file_name(step: int, suffix: str, again: int = 0) -> str:
    """Say how the file of a step is called: the first, or the one of a step that was saved again."""
    return f"step-{step:08}{f'-{again}' if again else ''}{suffix}"


@dataclass(frozen=True)
class Part:
    """One of the files of a checkpoint that several processes have written, each one of its own."""

    file: str
    """Its name. All parts after each other are the checkpoint."""
    nbytes: int
    """Bytes of it."""
    host: str
    """Who wrote it: where folders are not shared, the file is there."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a :class:`deepnvme.Checkpointer`."""

    step: int
    """The step that it was saved at."""
    path: Path
    """The file, which ``torch.load`` or safetensors read, too. Of one in parts, the list of them; of a sharded one, the
    folder."""
    nbytes: int
    """Bytes of the file, or of all."""
    time: str
    """When it was saved: ISO 8601, UTC."""
    index_offset: int
    """Where in the file its index is: names and sizes, and the checksums that there are."""
    index_nbytes: int
    """Bytes of that."""
    index_crc64: str
    """CRC-64/NVME of that. With checksums, files whose tensors differ in a byte have different ones, but for a chance
    of one in 2**64. Without them, the index of an archive has CRC-32s of its records, and that of a safetensors file
    no more than names, types and sizes."""
    torch: str
    """The version of torch that saved it."""
    deepnvme: str
    """The version of deepnvme that saved it."""
    parts: tuple[Part, ...] = ()
    """The files of one in parts, in their order."""

    @property
    def is_sharded(self) -> bool:
        """Whether it is a folder, in which each process has saved its own part of each tensor."""
        return not self.path.suffix

    def check(self) -> None:
        """Compare the file with what was written down when it was saved; reads its index only.

        That finds another file under the name. Damage to the tensors is found by ``restore(verify="full")``.

        Raises:
            FileNotFoundError: the file is gone, or a part of it is not here.
            deepnvme.errors.ChecksumError: it is another file.
        """
        if self.parts:
            is_same = self._check_parts()
        elif self.is_sharded:
            is_same = self._is_index(self.path / SHARDS_LIST)
        else:
            is_same = self.path.stat().st_size == self.nbytes and self._is_index(self.path)
        if is_same:
            return
        msg = f"{self.path}: this is not the file that was saved at step {self.step}; restore an earlier step"
        raise ChecksumError(msg)

    def _is_index(self, path: Path | str) -> bool:
        try:
            return f"{_crc64(path, self.index_offset, self.index_nbytes):016x}" == self.index_crc64
        except CorruptFileError:
            # It ends too early.
            return False

    def _check_parts(self) -> bool:
        """Look for all parts; whether they are those that were saved."""
        if not self.path.exists():
            raise self.missing(self.path.name, self.parts[0].host)
        # The index lies in one part, or in several: as one stretch it has an address of its own.
        index = os.memfd_create("deepnvme-index", os.MFD_CLOEXEC)
        try:
            begin = 0
            for part in self.parts:
                path = self.path.with_name(part.file)
                if not path.exists():
                    raise self.missing(part.file, part.host)
                if path.stat().st_size != part.nbytes:
                    return False
                start = max(self.index_offset - begin, 0)
                wanted = min(self.index_offset + self.index_nbytes - begin, part.nbytes) - start
                if wanted > 0:
                    with path.open("rb") as file_:
                        file_.seek(start)
                        os.write(index, file_.read(wanted))
                begin += part.nbytes
            stretch = f"/proc/self/fd/{index}"
            return f"{_crc64(stretch, 0, self.index_nbytes):016x}" == self.index_crc64
        finally:
            os.close(index)

    def missing(self, name: str, host: str) -> NotFoundError:
        """Say that a file of it is not here, and where it is."""
        text = f"{self.path.parent}: {name} of step {self.step} is not here; a process on {host} wrote it there"
        remedy = "Call fetch_parts() of the Checkpointer in all processes, give a folder that all see, or bring it here"
        return NotFoundError(f"{text}. {remedy}")


def read(folder: Path) -> list[Checkpoint]:
    """Give the checkpoints that the manifest lists and that are there, the oldest step first."""
    path = folder / NAME
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    try:
        wire = json.loads(text)
        if wire["version"] != _VERSION:
            msg = f"{path}: version {wire['version']} is of a later deepnvme; upgrade"
            raise CorruptFileError(msg)
        found = [_entry(folder, entry) for entry in wire["checkpoints"]]
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CorruptFileError):
            raise
        msg = f"{path}: this is no manifest of checkpoints ({error}); move it away, and name a checkpoint's file"
        raise CorruptFileError(msg) from error
    return sorted((entry for entry in found if entry.path.exists()), key=lambda entry: entry.step)


def _entry(folder: Path, entry: dict[str, Any]) -> Checkpoint:
    name = entry.pop("file")
    parts = tuple(Part(**part) for part in entry.pop("parts", ()))
    for listed in (name, *(part.file for part in parts)):
        if not _FILES.fullmatch(listed):
            msg = f"{listed!r} is no checkpoint of this folder"
            raise ValueError(msg)
    return Checkpoint(path=folder / name, parts=parts, **entry)


def write(folder: Path, entries: list[Checkpoint], durability: Literal["none", "data", "full"]) -> None:
    """Replace the manifest at once."""
    wire = {"version": _VERSION, "checkpoints": [_wire(entry) for entry in entries]}
    with file.open(folder / NAME, "wb", durability=durability) as out:
        out.write((json.dumps(wire, indent=1) + "\n").encode())


def _wire(entry: Checkpoint) -> dict[str, Any]:
    fields = asdict(entry)
    if not entry.parts:
        del fields["parts"]
    return {"file": fields.pop("path").name, **fields}


def remove_others(folder: Path, entries: list[Checkpoint]) -> None:
    """Remove checkpoints that no manifest lists: retired ones, and what a crash left."""
    kept = {entry.path.name for entry in entries} | {part.file for entry in entries for part in entry.parts}
    for path in list(folder.iterdir()):
        if not _FILES.fullmatch(path.name) or path.name in kept:
            continue
        if path.suffix:
            remove(path)
        elif (path / SHARDS_LIST).exists():
            # Under a private name first: what is left of it if this process dies is known for what it is.
            doomed = private_name(path)
            # Processes on several machines may look after the same folder.
            with suppress(FileNotFoundError):
                path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    remove_stale(folder, _FILES)


def private_name(path: Path) -> Path:
    """Give the name of a folder before it is whole, and when it is not any more."""
    names = (path.with_name(f".{path.name}{MARK}{os.getpid()}-{again}") for again in range(sys.maxsize))
    return next(name for name in names if not name.exists())
