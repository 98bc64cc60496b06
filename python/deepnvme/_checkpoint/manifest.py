"""The checkpoints that a folder's manifest lists. Reading and writing the manifest is the extension's."""

from __future__ import annotations

import json
import stat
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.metadata_file import METADATA_BYTES_MAX
from deepnvme._deepnvme import _crc64, _crc64_of_all, _places_of
from deepnvme.errors import (
    ChecksumError,
    CorruptFileError,
    InvalidArgumentError,
    IsFolderError,
    NotFolderError,
    NotFoundError,
)

if TYPE_CHECKING:
    import os
    from pathlib import Path

# What lists the parts of a checkpoint that is in several files.
PARTS_LIST = ".stripes.json"
# What a sharded checkpoint's folder has when it is whole.
SHARDS_LIST = "deepnvme.json"
# Bytes at the beginning of a part that its checksum covers.
HEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class Part:
    """One of the files of a checkpoint that several processes have written, each one of its own."""

    file: str
    """Its name. All parts after each other are the checkpoint."""
    nbytes: int
    """Bytes of it."""
    host: str
    """Who wrote it: where folders are not shared, the file is there."""
    head_crc64: str | None = None
    """CRC-64/NVME of its first 64 KiB: what a file of its name needs to be taken for it."""


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
        # Until it has its name, a private one with it in it.
        return ".pt" not in self.path.name and ".safetensors" not in self.path.name

    def check(self) -> None:
        """Compare the file with what was written down when it was saved; reads its index only.

        That finds another file under the name. Damage to the tensors is found by ``restore(verify="full")``.

        Raises:
            FileNotFoundError: the file is gone, or a part of it is not here.
            deepnvme.errors.ChecksumError: it is another file.
        """
        try:
            is_same = self._is_as_saved()
        except (CorruptFileError, IsFolderError, InvalidArgumentError, NotFolderError):
            # It ends too early, or something that is no file has its name.
            is_same = False
        if is_same:
            return
        msg = f"{self.path}: this is not the file that was saved at step {self.step}; restore an earlier step"
        raise ChecksumError(msg)

    def _is_as_saved(self) -> bool:
        if self.index_nbytes > METADATA_BYTES_MAX:
            # Reading as much as a manifest claims could take days, and all memory.
            return False
        if self.parts:
            return self._check_parts()
        if self.is_sharded:
            return self._is_index(self.path / SHARDS_LIST)
        return self._is_index(self.path) and self.path.stat().st_size == self.nbytes

    def _is_index(self, path: Path) -> bool:
        try:
            return f"{_crc64(path, self.index_offset, self.index_nbytes):016x}" == self.index_crc64
        except NotFoundError as error:
            why = "is a symbolic link that leads nowhere" if path.is_symlink() else "is not there"
            text = f"{path}: the manifest lists step {self.step}, and this file {why}"
            raise NotFoundError(f"{text}; bring it back, or restore another step") from error

    def _check_parts(self) -> bool:
        """Look for all parts; whether they are those that were saved."""
        self._stat(self.path.name, self.parts[0].host)
        # The index lies in one part, or in several.
        stretches, begin = [], 0
        for part in self.parts:
            found = self._stat(part.file, part.host)
            if not stat.S_ISREG(found.st_mode) or found.st_size != part.nbytes:
                return False
            start = max(self.index_offset - begin, 0)
            wanted = min(self.index_offset + self.index_nbytes - begin, part.nbytes) - start
            if wanted > 0:
                stretches.append((self.path.with_name(part.file), start, wanted))
            begin += part.nbytes
        return f"{_crc64_of_all(stretches):016x}" == self.index_crc64

    def _stat(self, name: str, host: str) -> os.stat_result:
        try:
            return self.path.with_name(name).stat()
        except FileNotFoundError:
            raise self.missing(name, host) from None

    def missing(self, name: str, host: str) -> NotFoundError:
        """Say that a file of it is not here, and where it is."""
        text = f"{self.path.parent}: {name} of step {self.step} is not here; a process on {host} wrote it there"
        remedy = "Call fetch_parts() of the Checkpointer in all processes, give a folder that all see, or bring it here"
        return NotFoundError(f"{text}. {remedy}")


def entries_of(folder: Path, text: str) -> list[Checkpoint]:
    """Understand what a manifest lists. Files that may not be renamed here have their private names still."""
    return [_entry(*found) for found in zip(json.loads(text)["checkpoints"], _places_of(folder, text), strict=True)]


def _entry(entry: dict[str, Any], path: Path) -> Checkpoint:
    fields = {name: value for name, value in entry.items() if name not in ("file", "pending", "parts")}
    return Checkpoint(path=path, parts=tuple(Part(**part) for part in entry.get("parts", ())), **fields)


def wire_of(entry: Checkpoint, pending: dict[str, str] | None = None) -> str:
    """Say it as the manifest has it; ``pending`` are private names that files have until they get their own."""
    fields = asdict(entry)
    fields["parts"] = [{key: value for key, value in part.items() if value is not None} for part in fields["parts"]]
    return json.dumps({"file": fields.pop("path").name, **fields, "pending": pending or {}})
