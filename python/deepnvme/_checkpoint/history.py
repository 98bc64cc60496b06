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

    from deepnvme._checkpoint.background_save import Saved
    from deepnvme._checkpoint.distributed.process_group import Team
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


class Shared(Protocol):
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
class Alone(Protocol):
    """A save of one file by one process."""

    def take_file(self) -> _NewFile:
        """Give the file that is on the disk under a private name."""


class Retained:
    """What the manifest of a folder lists, and how that changes: at one instant, the replacement of the manifest.

    Of several processes the leader reads and writes it, and the others know what it says.
    """

    def __init__(self, folder: Path, keep: int | None, team: Team, *, is_synced: bool) -> None:
        self.folder = folder
        self._team = team
        self._history = _History(folder, keep, is_synced)
        self._said: set[str] = set()
        self._begun = 0
        self._committed: dict[int, int] = {}
        _all.add(self)
        self.entries: list[Checkpoint] = []
        self._take_over(team.agree(self._read)[0])

    def _read(self) -> str:
        # Also where the leader's folder is not this one: parts go there.
        self._history.make()
        return self._history.read() if self._team.is_leader else ""

    def _take_over(self, text: str) -> None:
        """Have what the leader lists, with the paths that this process has for the files."""
        if not self._team.is_leader:
            self._history.follow(text)
        self.entries = entries_of(self.folder, text)

    def refresh(self) -> bool:
        """Read the manifest again; whether it lists something else now."""
        if not self._team.is_alone:
            return False
        before = self.entries
        self.entries = entries_of(self.folder, self._history.read())
        return self.entries != before

    def follow(self) -> None:
        """Learn what another process has saved meanwhile, where this one does not save."""
        if self._team.is_alone and not self._history.is_claimed:
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

    def begin(self, step: int, suffix: str) -> Path:
        """Become the one who saves into the folder, and give a name that no file has, for a process alone."""
        self._claim(secrets.token_hex(16))
        return self.folder / self._history.reserve(step, suffix, [])

    def _claim(self, token: str) -> str:
        """Take the lock; what the manifest says then, if this process did not have it before, or nothing."""
        had = self._history.is_claimed
        since = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        name = f"process {os.getpid()} on {socket.gethostname()} (since {since})"
        unlisted, is_unlocked = self._history.claim(name, token, self._team.is_leader)
        if is_unlocked:
            self._say("", f"{self.folder}: this file system has no locks; see to it that nobody else saves there")
        if unlisted:
            text = f"{self.folder}: {', '.join(unlisted)}: not in the manifest"
            self._say(text, f"{text}; these files stay, and are neither restored nor counted")
        if had and not unlisted:
            return ""
        self._history.settle() if self._team.is_alone else None
        if self._team.is_leader:
            self.entries = entries_of(self.folder, self._history.read())
        return self._history.text

    def begin_together(self, step: int) -> tuple[str, str, list[str]]:
        """Do a process's part of that, among several: the leader's token and manifest, and names that are taken."""
        token, text = "", ""
        if self._team.is_leader:
            token = secrets.token_hex(16)
            text = self._claim(token)
        names = self._history.names_of(step) if self._team.is_first_of_host else []
        return token, text, names

    def choose_together(self, begun: list[tuple[str, str, list[str]]], step: int, suffix: str) -> str:
        """Take over what the leader has found, and give the name that it chooses."""
        token, text, _ = begun[0]
        if text:

            def follow() -> None:
                if not self._team.is_leader:
                    self._take_over(text)
                    if self._team.is_first_of_host:
                        self._claim(token)

            self._team.agree(follow)
            self._settle_together()
        taken = [name for _, _, names in begun for name in names]
        return self._team.agree(lambda: self._history.reserve(step, suffix, taken) if self._team.is_leader else "")[0]

    def note_begun(self) -> int:
        """Count a save that begins: of two of one step, the one that began later counts."""
        self._begun += 1
        return self._begun

    def give_back(self, path: Path) -> None:
        """Give back a name that no checkpoint gets."""
        self._history.free(path.name)

    def commit(self, step: int, path: Path, saved: Saved, saving: object, begun: int) -> None:
        """Count a checkpoint that is on the disk, and remove those that do not count any more."""
        if isinstance(saving, Alone):
            self._commit_alone(step, path, saved, saving.take_file(), begun)
        else:
            self._commit_together(step, path, saved, saving)  # type: ignore[arg-type]

    def _commit_alone(self, step: int, path: Path, saved: Saved, new: _NewFile, begun: int) -> None:
        if self._committed.get(step, 0) > begun:
            # A signal handler has saved a later state of this step while this save was under way.
            new.give_up()
            self.give_back(path)
            return
        if not self._history.is_claimed:
            # It was closed meanwhile.
            self._claim(secrets.token_hex(16))
        try:
            settled = self._history.commit(wire_of(_new_entry(step, path, saved)), new)
        finally:
            self.entries = entries_of(self.folder, self._history.text)
        self._committed[step] = begun
        self._tell(settled)

    def _commit_together(self, step: int, path: Path, saved: Saved, saving: Shared) -> None:
        entry = _new_entry(step, path, saved, saving.parts)
        failed: list[Exception] = []

        def publish() -> str:
            if not self._team.is_leader:
                return ""
            try:
                self._history.publish(wire_of(entry, saving.pending))
            except Exception as error:
                if self._history.counts(path.name) is False:
                    raise
                failed.append(error)
            return self._history.text

        try:
            text = self._team.agree(publish)[0]
        except BaseException as error:
            # Where the others are out of reach, they may have gone on, and the leader may count what is here.
            saving.give_up() if self._team.knows_of(error) else saving.keep()
            raise
        finally:
            self.give_back(path)
        saving.keep()
        self._take_over(text)
        self._settle_together()

        def check() -> None:
            if failed:
                raise failed[0]

        self._team.agree(check)

    def _settle_together(self) -> None:
        """Give files their names and remove retired ones: folders of other machines may be others."""

        def settle() -> _Settled | None:
            is_its_turn = self._team.is_leader or self._team.is_first_of_host
            return self._history.settle() if is_its_turn else None

        # The leader first: where all see one folder, the others find nothing left to do.
        leaders = self._team.agree(lambda: settle() if self._team.is_leader else None)
        others = self._team.agree(lambda: None if self._team.is_leader else settle())
        everybodys = [settled for settled in (*leaders, *others) if settled is not None]
        placed, gone = (set.intersection(*(set(one[kind]) for one in everybodys)) for kind in (2, 3))
        self._history.note(sorted(placed), sorted(gone))
        self.entries = entries_of(self.folder, self._history.text)
        for settled in everybodys if self._team.is_leader else ():
            self._tell(settled)

    def _tell(self, settled: _Settled) -> None:
        foreign, failures, _, _ = settled
        for name in foreign:
            self._say(name, f"{self.folder / name}: this is not what was saved under that name; it stays")
        for failure in failures:
            self._say(failure, f"{self.folder}: {failure}; it is tried again with the next save")

    def _say(self, what: str, text: str) -> None:
        """Warn of something once."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, UserWarning, stacklevel=5)

    def release(self) -> None:
        """Let others save into the folder."""
        self._history.release()

    def abandon(self) -> None:
        """Leave the lock to the process that this one was forked from."""
        self._history.abandon()


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


def _new_entry(step: int, path: Path, saved: Saved, parts: tuple[Part, ...] = ()) -> Checkpoint:
    import torch  # noqa: PLC0415

    nbytes, offset, index_nbytes, crc64 = saved
    now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    crc, torchs = f"{crc64:016x}", str(torch.__version__)
    return Checkpoint(step, path, nbytes, now, offset, index_nbytes, crc, torchs, __version__, parts)


# What may hold a lock, which a forked child inherits the file of.
_all: weakref.WeakSet[Retained] = weakref.WeakSet()


def _abandon_all() -> None:
    for retained in list(_all):
        retained.abandon()


os.register_at_fork(after_in_child=_abandon_all)
