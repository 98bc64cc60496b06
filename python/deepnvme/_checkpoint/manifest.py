"""The list of checkpoints in a folder: what counts, and what is left of a crash."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepnvme._file as file
from deepnvme._checkpoint.leftovers import remove_stale
from deepnvme._deepnvme import _crc64
from deepnvme.errors import ChecksumError, CorruptFileError

if TYPE_CHECKING:
    from typing import Literal

NAME = "manifest.json"
_VERSION = 1
# What checkpoints are called: nothing else in the folder is ever removed.
_FILES = re.compile(r"step-[0-9]{8,}(-[0-9]+)?\.(pt|safetensors)")


def file_name(step: int, suffix: str, again: int = 0) -> str:
    """Say how the file of a step is called: the first, or the one of a step that was saved again."""
    return f"step-{step:08}{f'-{again}' if again else ''}.{suffix}"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a :class:`deepnvme.Checkpointer`."""

    step: int
    """The step that it was saved at."""
    path: Path
    """The file, which ``torch.load`` or safetensors read, too."""
    nbytes: int
    """Bytes of the file."""
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

    def check(self) -> None:
        """Compare the file with what was written down when it was saved; reads its index only.

        That finds another file under the name. Damage to the tensors is found by ``restore(verify="full")``.

        Raises:
            FileNotFoundError: the file is gone.
            deepnvme.errors.ChecksumError: it is another file.
        """
        found = self.path.stat().st_size
        if found == self.nbytes:
            found_crc64 = f"{_crc64(self.path, self.index_offset, self.index_nbytes):016x}"
            if found_crc64 == self.index_crc64:
                return
        msg = f"{self.path}: this is not the file that was saved at step {self.step}; restore an earlier step"
        raise ChecksumError(msg)


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
    if not _FILES.fullmatch(name):
        msg = f"{name!r} is no checkpoint of this folder"
        raise ValueError(msg)
    return Checkpoint(path=folder / name, **entry)


def write(folder: Path, entries: list[Checkpoint], durability: Literal["none", "data", "full"]) -> None:
    """Replace the manifest at once."""
    wire = {"version": _VERSION, "checkpoints": [_wire(entry) for entry in entries]}
    with file.open(folder / NAME, "wb", durability=durability) as out:
        out.write((json.dumps(wire, indent=1) + "\n").encode())


def _wire(entry: Checkpoint) -> dict[str, Any]:
    fields = asdict(entry)
    return {"file": fields.pop("path").name, **fields}


def remove_others(folder: Path, entries: list[Checkpoint]) -> None:
    """Remove checkpoints that no manifest lists: retired ones, and what a crash left."""
    kept = {entry.path.name for entry in entries}
    for path in list(folder.iterdir()):
        if _FILES.fullmatch(path.name) and path.name not in kept:
            path.unlink(missing_ok=True)
    remove_stale(folder, _FILES)
