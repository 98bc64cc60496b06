"""The checkpoints that a folder's manifest lists. Reading and writing the manifest is the extension's."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deepnvme._checkpoint.metadata_file import METADATA_BYTES_MAX, open_regular
from deepnvme._deepnvme import _crc64
from deepnvme.errors import ChecksumError, CorruptFileError, NotFoundError

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
        if self.index_nbytes > METADATA_BYTES_MAX:
            # Reading as much as a manifest claims could take days, and all memory.
            is_same = False
        elif self.parts:
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
                    with open_regular(path) as file_:
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


def entries_of(folder: Path, text: str) -> list[Checkpoint]:
    """Understand what a manifest lists."""
    return [_entry(folder, entry) for entry in json.loads(text)["checkpoints"]]


def _entry(folder: Path, entry: dict[str, Any]) -> Checkpoint:
    name, pending = entry.pop("file"), entry.pop("pending", {})
    parts = tuple(Part(**part) for part in entry.pop("parts", ()))
    own = Checkpoint(path=folder / name, parts=parts, **entry)
    # Where this process may not rename, a file may have its private name still.
    private = replace(own, path=folder / pending.get(name, name))
    if private == own or not os.path.lexists(private.path) or (os.path.lexists(own.path) and _is_saved(own)):
        return own
    # It may have got its name in between.
    return private if os.path.lexists(private.path) else own


def _is_saved(checkpoint: Checkpoint) -> bool:
    """Whether it is what was saved: somebody else may have made a file of its name before it got it."""
    try:
        checkpoint.check()
    except OSError:
        return False
    return True


def wire_of(entry: Checkpoint, pending: dict[str, str] | None = None) -> str:
    """Say it as the manifest has it; ``pending`` are private names that files have until they get their own."""
    fields = asdict(entry)
    fields["parts"] = [{key: value for key, value in part.items() if value is not None} for part in fields["parts"]]
    return json.dumps({"file": fields.pop("path").name, **fields, "pending": pending or {}})
