"""The checkpoints of a folder, for one process or for several that keep them together.

What counts, what stays and what is removed is decided by the extension (``_History``); here is who of several
processes does which step, and what users are told.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import secrets
import socket
import stat
import warnings
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deepnvme._deepnvme import __version__, _crc64, _crc64_of_all, _History, _places_of
from deepnvme._utils.arguments import whole
from deepnvme._utils.metadata_file import METADATA_BYTES_MAX
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
    from deepnvme._checkpoint.distributed.process_group import RankGroup
    from deepnvme._deepnvme import _NewFile

    # Names of somebody else's files, failures, checkpoints that have their names, retired ones that are gone.
    _Settled = tuple[list[str], list[str], list[str], list[str]]

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
        ranges, part_start = [], 0
        for part in self.parts:
            found = self._stat(part.file, part.host)
            if not stat.S_ISREG(found.st_mode) or found.st_size != part.nbytes:
                return False
            start = max(self.index_offset - part_start, 0)
            wanted = min(self.index_offset + self.index_nbytes - part_start, part.nbytes) - start
            if wanted > 0:
                ranges.append((self.path.with_name(part.file), start, wanted))
            part_start += part.nbytes
        return f"{_crc64_of_all(ranges):016x}" == self.index_crc64

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


class UncommittedFiles(Protocol):
    """A save of several processes, or of a folder, whose files are on the disk and have private names."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The files of one in parts."""

    @property
    def pending(self) -> dict[str, str]:
        """Names, and the private names that the files have until then."""

    def keep(self) -> None:
        """Leave the files: a manifest lists them."""

    def give_up(self) -> None:
        """Remove them."""


@runtime_checkable
class UncommittedFile(Protocol):
    """A save of one file by one process."""

    def take_file(self) -> _NewFile:
        """Give the file that is on the disk under a private name."""


class History:
    """What the manifest of a folder lists, and how that changes: at one instant, the replacement of the manifest.

    Of several processes the leader reads and writes it, and the others know what it says.
    """

    def __init__(self, folder: Path, keep: int | None, group: RankGroup, *, is_synced: bool) -> None:
        self.folder = folder
        self._group = group
        self._native = _History(folder, keep, is_synced)
        self._warned: set[str] = set()
        self._saves_started = 0
        self._committed_numbers: dict[int, int] = {}
        _instances.add(self)
        self.entries: list[Checkpoint] = []
        self._adopt_manifest(group.run_on_all(self._read)[0])

    def _read(self) -> str:
        # Also where the leader's folder is not this one: parts go there.
        self._native.make()
        return self._native.read() if self._group.is_leader else ""

    def _adopt_manifest(self, text: str) -> None:
        """Have what the leader lists, with the paths that this process has for the files."""
        if not self._group.is_leader:
            self._native.follow(text)
        self.entries = decode_manifest(self.folder, text)

    def refresh(self) -> bool:
        """Read the manifest again; whether it lists something else now."""
        if not self._group.is_single:
            return False
        before = self.entries
        self.entries = decode_manifest(self.folder, self._native.read())
        return self.entries != before

    def refresh_if_unlocked(self) -> None:
        """Learn what another process has saved meanwhile, where this one does not save."""
        if self._group.is_single and not self._native.is_claimed:
            self.refresh()

    def find(self, step: int | None) -> Checkpoint:
        """Give the checkpoint of a step, or the newest."""
        step = None if step is None else whole(step, "step")
        found = [entry for entry in self.entries if step is None or entry.step == step]
        if not found:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            steps = ", ".join(str(entry.step) for entry in self.entries) or "none"
            msg = f"{self.folder}: there is {what}; those that are there: {steps}"
            raise NotFoundError(msg)
        return found[-1]

    def reserve(self, step: int, suffix: str) -> Path:
        """Become the one who saves into the folder, and give a name that no file has, for a process alone."""
        self._lock(secrets.token_hex(16))
        return self.folder / self._native.reserve(step, suffix, [])

    def _lock(self, token: str) -> str:
        """Take the lock; what the manifest says then, if this process did not have it before, or nothing."""
        had = self._native.is_claimed
        since = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        name = f"process {os.getpid()} on {socket.gethostname()} (since {since})"
        unlisted, is_unlocked = self._native.claim(name, token, self._group.is_leader)
        if is_unlocked:
            self._warn_once("", f"{self.folder}: this file system has no locks; see to it that nobody else saves there")
        if unlisted:
            text = f"{self.folder}: {', '.join(unlisted)}: not in the manifest"
            self._warn_once(text, f"{text}; these files stay, and are neither restored nor counted")
        if had and not unlisted:
            return ""
        self._native.settle() if self._group.is_single else None
        if self._group.is_leader:
            self.entries = decode_manifest(self.folder, self._native.read())
        return self._native.text

    def prepare_shared(self, step: int) -> tuple[str, str, list[str]]:
        """Do a process's part of that, among several: the leader's token and manifest, and names that are taken."""
        token, text = "", ""
        if self._group.is_leader:
            token = secrets.token_hex(16)
            text = self._lock(token)
        names = self._native.names_of(step) if self._group.is_first_on_host else []
        return token, text, names

    def reserve_shared(self, number: list[tuple[str, str, list[str]]], step: int, suffix: str) -> str:
        """Take over what the leader has found, and give the name that it chooses."""
        token, text, _ = number[0]
        if text:

            def follow() -> None:
                if not self._group.is_leader:
                    self._adopt_manifest(text)
                    if self._group.is_first_on_host:
                        self._lock(token)

            self._group.run_on_all(follow)
            self._settle_shared()
        taken = [name for _, _, names in number for name in names]
        return self._group.run_on_all(
            lambda: self._native.reserve(step, suffix, taken) if self._group.is_leader else ""
        )[0]

    def start_number(self) -> int:
        """Count a save that begins: of two of one step, the one that began later counts."""
        self._saves_started += 1
        return self._saves_started

    def release_name(self, path: Path) -> None:
        """Give back a name that no checkpoint gets."""
        self._native.free(path.name)

    def commit(self, step: int, path: Path, saved: SaveResult, saving: object, number: int) -> None:
        """Count a checkpoint that is on the disk, and remove those that do not count any more."""
        if isinstance(saving, UncommittedFile):
            self._commit_single(step, path, saved, saving.take_file(), number)
        else:
            self._commit_shared(step, path, saved, saving)  # type: ignore[arg-type]

    def _commit_single(self, step: int, path: Path, saved: SaveResult, new: _NewFile, number: int) -> None:
        if self._committed_numbers.get(step, 0) > number:
            # A signal handler has saved a later state of this step while this save was under way.
            new.give_up()
            self.release_name(path)
            return
        if not self._native.is_claimed:
            # It was closed meanwhile.
            self._lock(secrets.token_hex(16))
        try:
            settled = self._native.commit(encode_entry(_new_checkpoint(step, path, saved)), new)
        finally:
            self.entries = decode_manifest(self.folder, self._native.text)
        self._committed_numbers[step] = number
        self._warn_about(settled)

    def _commit_shared(self, step: int, path: Path, saved: SaveResult, saving: UncommittedFiles) -> None:
        entry = _new_checkpoint(step, path, saved, saving.parts)
        failed: list[Exception] = []

        def publish() -> str:
            if not self._group.is_leader:
                return ""
            try:
                self._native.publish(encode_entry(entry, saving.pending))
            except Exception as error:
                if self._native.counts(path.name) is False:
                    raise
                failed.append(error)
            return self._native.text

        try:
            text = self._group.run_on_all(publish)[0]
        except BaseException as error:
            # Where the others are out of reach, they may have gone on, and the leader may count what is here.
            saving.give_up() if self._group.is_shared_error(error) else saving.keep()
            raise
        finally:
            self.release_name(path)
        saving.keep()
        self._adopt_manifest(text)
        self._settle_shared()

        def check() -> None:
            if failed:
                raise failed[0]

        self._group.run_on_all(check)

    def _settle_shared(self) -> None:
        """Give files their names and remove retired ones: folders of other machines may be others."""

        def settle() -> _Settled | None:
            is_its_turn = self._group.is_leader or self._group.is_first_on_host
            return self._native.settle() if is_its_turn else None

        # The leader first: where all see one folder, the others find nothing left to do.
        leaders = self._group.run_on_all(lambda: settle() if self._group.is_leader else None)
        others = self._group.run_on_all(lambda: None if self._group.is_leader else settle())
        everybodys = [settled for settled in (*leaders, *others) if settled is not None]
        placed, gone = (set.intersection(*(set(one[kind]) for one in everybodys)) for kind in (2, 3))
        self._native.note(sorted(placed), sorted(gone))
        self.entries = decode_manifest(self.folder, self._native.text)
        for settled in everybodys if self._group.is_leader else ():
            self._warn_about(settled)

    def _warn_about(self, settled: _Settled) -> None:
        foreign, failures, _, _ = settled
        for name in foreign:
            self._warn_once(name, f"{self.folder / name}: this is not what was saved under that name; it stays")
        for failure in failures:
            self._warn_once(failure, f"{self.folder}: {failure}; it is tried again with the next save")

    def _warn_once(self, what: str, text: str) -> None:
        """Warn of something once."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(text, UserWarning, stacklevel=5)

    def unlock(self) -> None:
        """Let others save into the folder."""
        self._native.release()

    def abandon_lock(self) -> None:
        """Leave the lock to the process that this one was forked from."""
        self._native.abandon()


def decode_manifest(folder: Path, text: str) -> list[Checkpoint]:
    """Understand what a manifest lists. Files that may not be renamed here have their private names still."""
    return [
        _decode_entry(*found) for found in zip(json.loads(text)["checkpoints"], _places_of(folder, text), strict=True)
    ]


def _decode_entry(entry: dict[str, Any], path: Path) -> Checkpoint:
    fields = {name: value for name, value in entry.items() if name not in ("file", "pending", "parts")}
    return Checkpoint(path=path, parts=tuple(Part(**part) for part in entry.get("parts", ())), **fields)


def encode_entry(entry: Checkpoint, pending: dict[str, str] | None = None) -> str:
    """Say it as the manifest has it; ``pending`` are private names that files have until they get their own."""
    fields = asdict(entry)
    fields["parts"] = [{key: value for key, value in part.items() if value is not None} for part in fields["parts"]]
    return json.dumps({"file": fields.pop("path").name, **fields, "pending": pending or {}})


def _new_checkpoint(step: int, path: Path, saved: SaveResult, parts: tuple[Part, ...] = ()) -> Checkpoint:
    import torch  # noqa: PLC0415

    nbytes, offset, index_nbytes, crc64 = saved
    now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    crc, torchs = f"{crc64:016x}", str(torch.__version__)
    return Checkpoint(step, path, nbytes, now, offset, index_nbytes, crc, torchs, __version__, parts)


# What may hold a lock, which a forked child inherits the file of.
_instances: weakref.WeakSet[History] = weakref.WeakSet()


def _abandon_all() -> None:
    for history in list(_instances):
        history.abandon_lock()


os.register_at_fork(after_in_child=_abandon_all)
