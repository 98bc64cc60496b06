"""One checkpoint as the manifest lists it: its files, what identifies them, and its text in the manifest."""

from __future__ import annotations

import datetime as dt
import json
import stat
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deepnvme._deepnvme import __version__, _checkpoint_paths, _crc64, _crc64_of_all
from deepnvme._utils.metadata_file import METADATA_BYTES_MAX
from deepnvme._utils.public import public
from deepnvme.errors import (
    ChecksumError,
    CorruptFileError,
    InvalidArgumentError,
    IsFolderError,
    NotFolderError,
    NotFoundError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme._checkpoint.background_save import SaveResult

# Suffix of the file that lists the parts of a checkpoint.
PARTS_LIST = ".stripes.json"
# Index in a complete folder of a sharded checkpoint.
SHARDS_LIST = "deepnvme.json"
# Bytes at the start of a part that its checksum covers.
HEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint that several processes wrote, each its own file."""

    file: str
    """Its name. The parts in order, joined, are the checkpoint."""
    nbytes: int
    """Its size in bytes."""
    host: str
    """The machine that wrote it. If folders are not shared, the file is there."""
    head_crc64: str | None = None
    """CRC-64/NVME of its first 64 KiB, which distinguishes it from other files of its name."""
    written_ns: int | None = None
    """Its modification time after the save, in nanoseconds since 1970. A file with a later one is kept when the
    checkpoint is retired."""

    def is_at(self, path: Path) -> bool:
        """Whether this part is at that path. Reads its first 64 KiB only.

        Raises:
            FileNotFoundError: there is no file.
        """
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != self.nbytes:
            return False
        return self.head_crc64 in (None, f"{_crc64(path, 0, min(self.nbytes, HEAD_BYTES)):016x}")


@public
@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a :class:`deepnvme.Checkpointer`.

    Attributes:
        step: the step of this checkpoint.
        path: the file, which ``torch.load`` or safetensors also read. For parts, the JSON file that lists them (the
            parts themselves are in ``parts``); for a sharded checkpoint, the folder.
        nbytes: the size in bytes, of all files together.
        time: when it was saved, as ISO 8601 in UTC.
        index_offset: offset of the index in the file. The index contains names, sizes and any checksums.
        index_nbytes: size of the index in bytes.
        index_crc64: CRC-64/NVME of the index. With checksums, files whose tensors differ also differ here
            (except with a chance of one in 2**64). Without them, the index of an archive contains CRC-32s of
            its records, and that of a safetensors file only names, dtypes and sizes.
        torch: the torch version that saved it.
        deepnvme: the deepnvme version that saved it.
        parts: the part files in order, if there are several.
        written_ns: the latest modification time of its files after the save, in nanoseconds since 1970. If a file
            was modified later, it is kept when ``keep`` removes the checkpoint. ``None`` for parts, which have their
            own.

    Example:
        >>> checkpointer = deepnvme.Checkpointer("checkpoints")
        >>> checkpointer.save(7, {"weight": torch.ones(3)})
        True
        >>> checkpoint = checkpointer.latest()
        >>> checkpoint.step, checkpoint.path.suffix
        (7, '.pt')
        >>> checkpoint.check()
    """

    step: int
    path: Path
    nbytes: int
    time: str
    index_offset: int = field(repr=False)
    index_nbytes: int = field(repr=False)
    index_crc64: str = field(repr=False)
    torch: str = field(repr=False)
    deepnvme: str = field(repr=False)
    parts: tuple[Part, ...] = field(default=(), repr=False)
    written_ns: int | None = field(default=None, repr=False)

    @property
    def is_sharded(self) -> bool:
        """Whether it is a folder in which each process saved its own part of each tensor."""
        # `in`, not the suffix: a file may still have its private name, which contains the final one.
        return ".pt" not in self.path.name and ".safetensors" not in self.path.name

    def check(self) -> None:
        """Compare the file with the record made when it was saved. Reads its index only.

        This detects another file under the name. ``restore(verify="full")`` detects damage to the tensors.

        Raises:
            FileNotFoundError: the file or one of its parts is missing.
            deepnvme.errors.ChecksumError: it is another file.
        """
        try:
            is_same = self._is_as_saved()
        except (CorruptFileError, IsFolderError, InvalidArgumentError, NotFolderError):
            # It is too short, or it is not a regular file.
            is_same = False
        if is_same:
            return
        msg = f"{self.path}: this is not the file that was saved at step {self.step}; restore an earlier step"
        raise ChecksumError(msg)

    def _is_as_saved(self) -> bool:
        if self.index_nbytes > METADATA_BYTES_MAX:
            # A damaged manifest may claim any size: reading it could take days and all memory.
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
            why = "is a dangling symbolic link" if path.is_symlink() else "is missing"
            text = f"{path}: the manifest lists step {self.step}, and this file {why}"
            raise NotFoundError(f"{text}; put it back, or restore another step") from error

    def _check_parts(self) -> bool:
        """Whether all parts are those that were saved. Raises if one is missing."""
        if not self.path.exists():
            raise missing_part(self, self.path.name, self.parts[0].host)
        # The index may span several parts.
        ranges, part_start = [], 0
        for part in self.parts:
            path = self.path.with_name(part.file)
            try:
                if not part.is_at(path):
                    return False
            except FileNotFoundError:
                raise missing_part(self, part.file, part.host) from None
            start = max(self.index_offset - part_start, 0)
            wanted = min(self.index_offset + self.index_nbytes - part_start, part.nbytes) - start
            if wanted > 0:
                ranges.append((path, start, wanted))
            part_start += part.nbytes
        return f"{_crc64_of_all(ranges):016x}" == self.index_crc64


def missing_part(checkpoint: Checkpoint, name: str, host: str) -> NotFoundError:
    """Return the error for a part that is missing on this machine. It says where the part is."""
    folder, step = checkpoint.path.parent, checkpoint.step
    text = f"{folder}: {name} of step {step} is missing here; a process on {host} wrote it there"
    remedy = "Call fetch_parts() of the Checkpointer in all processes, use a shared folder, or copy it here"
    return NotFoundError(f"{text}. {remedy}")


def decode_manifest(folder: Path, text: str) -> list[Checkpoint]:
    """Return the checkpoints that a manifest lists. Files that cannot be renamed here still have private names."""
    return [
        _decode_entry(*found)
        for found in zip(json.loads(text)["checkpoints"], _checkpoint_paths(folder, text), strict=True)
    ]


def _decode_entry(entry: dict[str, Any], path: Path) -> Checkpoint:
    fields = {name: value for name, value in entry.items() if name not in ("file", "pending", "parts")}
    return Checkpoint(path=path, parts=tuple(Part(**part) for part in entry.get("parts", ())), **fields)


def encode_entry(entry: Checkpoint, pending: dict[str, str] | None = None) -> str:
    """Encode a manifest entry. ``pending`` maps names to the private names that files have until they get them."""
    fields = asdict(entry)
    fields["parts"] = [{key: value for key, value in part.items() if value is not None} for part in fields["parts"]]
    return json.dumps({"file": fields.pop("path").name, **fields, "pending": pending or {}})


def new_checkpoint(step: int, path: Path, saved: SaveResult, parts: tuple[Part, ...] = ()) -> Checkpoint:
    """Describe a checkpoint that this process has saved now."""
    import torch  # noqa: PLC0415

    nbytes, offset, index_nbytes, crc64 = saved
    now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    crc, torchs = f"{crc64:016x}", str(torch.__version__)
    return Checkpoint(step, path, nbytes, now, offset, index_nbytes, crc, torchs, __version__, parts)
