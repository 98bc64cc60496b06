"""The checkpoints of a folder, for one process or for several that save together.

The extension (``_History``) decides what counts, what stays and what is removed. This module divides the steps among
several processes, and warns users.
"""

from __future__ import annotations

import datetime as dt
import errno
import os
import secrets
import socket
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deepnvme._checkpoint.checkpoint import Checkpoint, decode_manifest, encode_entry, new_checkpoint
from deepnvme._checkpoint.distributed.parts import Place, place_of
from deepnvme._deepnvme import _History
from deepnvme._utils.end_watch import EndWatch
from deepnvme._utils.public import first_of, warn_caller, whole
from deepnvme.errors import (
    NotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deepnvme._checkpoint.background_save import SaveResult
    from deepnvme._checkpoint.checkpoint import Part
    from deepnvme._checkpoint.distributed.process_group import RankGroup
    from deepnvme._deepnvme import _NewFile

    # Foreign files by name, failures, checkpoints that got their names, retired checkpoints that were removed.
    _Settled = tuple[list[str], list[str], list[str], list[str]]


class UncommittedFiles(Protocol):
    """The files or the folder of a save of several processes or of DTensors.

    They are complete under private names, and not yet in the manifest.
    """

    @property
    def parts(self) -> tuple[Part, ...]:
        """The part files, if there are any."""

    @property
    def pending(self) -> dict[str, str]:
        """Final names and the current private names of the files."""

    def keep(self) -> None:
        """Keep the files: a manifest lists them."""

    def discard(self) -> None:
        """Remove the files."""


@runtime_checkable
class UncommittedFile(Protocol):
    """The single file of a save by one process, not yet in the manifest."""

    def take_file(self) -> _NewFile:
        """Return the complete file, which has a private name."""


class History:
    """The checkpoints of a folder, and every change to them. A change is one replacement of the manifest.

    With several processes, the leader reads and writes the manifest, and sends it to the others.
    """

    def __init__(self, folder: Path, keep: int | None, group: RankGroup, *, is_synced: bool) -> None:
        self.folder = folder
        self._group = group
        self._native = _History(folder, keep, is_synced)
        self._warned: set[str] = set()
        self._saves_started = 0
        self._committed_numbers: dict[int, int] = {}
        # The very objects that `reserve` has returned, by name.
        self._reserved: dict[str, Path] = {}
        _instances.watch(self, None)
        self.entries: list[Checkpoint] = []
        found = group.run_on_all(self._read)
        text, places = found[0][0], [place for _, place in found]
        # Whether no lower rank has this folder: the others leave its files to that rank.
        self._is_first_here = places.index(places[group.rank]) == group.rank
        self._adopt_manifest(text)

    def _read(self) -> tuple[str, Place]:
        if self._group.is_single and self._can_make_later():
            # The first save makes it: reading the folder of a mistyped name makes none.
            return self._read_manifest(), ("", 0, 0)
        # Every process makes its folder: parts go there, even if it is not the leader's.
        self._native.make()
        text = self._read_manifest() if self._group.is_leader else ""
        return text, place_of(self.folder)

    def _can_make_later(self) -> bool:
        """Whether the folder is missing, and the first save is likely to be able to make it."""
        if os.path.lexists(self.folder):
            return False
        parent = next(above for above in self.folder.parents if os.path.lexists(above))
        return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)

    def _read_manifest(self) -> str:
        text = self._native.read()
        missing = [name for _, name in self._native.missing]
        if missing:
            warning = f"{self.folder}: the manifest lists files that are missing: {first_of(missing)}"
            remedy = "put them back before the next save, which removes them from the manifest"
            self._warn_once(",".join(missing), f"{warning}; {remedy}")
        return text

    def _adopt_manifest(self, text: str) -> None:
        """Take over the leader's manifest, with the paths that files have on this machine."""
        if not self._group.is_leader:
            self._native.adopt_shared(text)
        self.entries = decode_manifest(self.folder, text)

    def refresh(self) -> bool:
        """Read the manifest again. Returns whether it changed. With several processes it does nothing."""
        if not self._group.is_single:
            return False
        before = self.entries
        self.entries = decode_manifest(self.folder, self._read_manifest())
        return self.entries != before

    def refresh_if_unlocked(self) -> None:
        """Read what other processes saved, unless this process holds the lock."""
        if self._group.is_single and not self._native.is_claimed:
            self.refresh()

    def find(self, step: int | None) -> Checkpoint:
        """Return the checkpoint of a step, or the newest."""
        step = None if step is None else whole(step, "step")
        found = [entry for entry in self.entries if step is None or entry.step == step]
        for missing, name in self._native.missing if not found else ():
            if step in (None, missing):
                path = self.folder / name
                text = f"{path}: the manifest lists step {missing}, and this file is missing"
                raise NotFoundError(errno.ENOENT, f"{text}; put it back, or restore another step", str(path))
        if not found:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            # The newest are the likeliest to be meant.
            steps = first_of([str(entry.step) for entry in reversed(self.entries)]) or "none"
            if not os.path.lexists(self.folder):
                text = "there is no such folder, and no checkpoint; check the path"
                raise NotFoundError(errno.ENOENT, text, str(self.folder))
            msg = f"{self.folder}: there is {what}; available steps: {steps}"
            if unlisted := self._native.unlisted():
                msg += f"; not in the manifest: {first_of(unlisted)}; give deepnvme.load the path of one"
            raise NotFoundError(msg)
        return found[-1]

    def reserve(self, step: int, suffix: str) -> Path:
        """Lock the folder for a single process, and reserve an unused name."""
        self._lock(secrets.token_hex(16))
        path = self.folder / self._native.reserve(step, suffix, [])
        self._reserved[path.name] = path
        return path

    def _lock(self, group_id: str) -> str:
        """Take the lock.

        Returns:
            The manifest, if this process did not hold the lock before or has found unlisted checkpoints; else ``""``.
        """
        had = self._native.is_claimed
        if not had:
            self._native.make()
        since = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        name = f"process {os.getpid()} on {socket.gethostname()} (since {since})"
        unlisted, lacks_locks = self._native.claim(name, group_id, self._group.is_leader)
        if lacks_locks:
            self._warn_once(
                "", f"{self.folder}: this file system has no locks; make sure that nothing else saves there"
            )
        if unlisted:
            text = f"{self.folder}: not in the manifest: {first_of(unlisted)}"
            self._warn_once(",".join(unlisted), f"{text}; these files are kept, and are neither restored nor counted")
        if had and not unlisted:
            return ""
        if self._group.is_single:
            # Recorded, or the list of retired checkpoints would grow by one each time that a folder is locked.
            _, _, named, removed = self._native.settle()
            self._native.record_settled(named, removed)
        if self._group.is_leader:
            self.entries = decode_manifest(self.folder, self._read_manifest())
        return self._native.text

    def prepare_shared(self, step: int) -> tuple[str, str, list[str]]:
        """Lock the folder, if this process is the leader. Returns its group id, manifest, and names here."""
        group_id, text = "", ""
        if self._group.is_leader:
            group_id = secrets.token_hex(16)
            text = self._lock(group_id)
        names = self._native.names_of(step) if self._is_first_here else []
        return group_id, text, names

    def reserve_shared(self, number: list[tuple[str, str, list[str]]], step: int, suffix: str) -> str:
        """Take over the leader's manifest, and return the name that the leader reserves."""
        group_id, text, _ = number[0]
        if text:

            def follow() -> None:
                if not self._group.is_leader:
                    self._adopt_manifest(text)
                    if self._is_first_here:
                        self._lock(group_id)

            self._group.run_on_all(follow)
            self._settle_shared()
        taken = [name for _, _, names in number for name in names]
        return self._group.run_on_all(
            lambda: self._native.reserve(step, suffix, taken) if self._group.is_leader else ""
        )[0]

    def start_number(self) -> int:
        """Number a save as it begins: of two saves of one step, the one that began later counts."""
        self._saves_started += 1
        return self._saves_started

    def release_name(self, path: Path) -> None:
        """Release a reserved name that no checkpoint will use. Released twice, it may be that of another save."""
        if not self._group.is_single:
            self._native.release_name(path.name)
        elif self._reserved.get(path.name) is path:
            del self._reserved[path.name]
            self._native.release_name(path.name)

    def commit(  # noqa: PLR0917
        self,
        step: int,
        path: Path,
        saved: SaveResult,
        saving: object,
        number: int,
        check_wanted: Callable[[], None],
    ) -> None:
        """Add a complete checkpoint to the manifest, and remove those that no longer count.

        Args:
            step: its step.
            path: its path.
            saved: its size, and the offset, size and checksum of its index.
            saving: the save, which has its files.
            number: the number of the save.
            check_wanted: raises an error if the caller has given up this save. No rank commits then.
        """
        if isinstance(saving, UncommittedFile):
            check_wanted()
            self._commit_single(step, path, saved, saving.take_file(), number)
        else:
            self._commit_shared(step, path, saved, saving, check_wanted)  # type: ignore[arg-type]

    def _commit_single(self, step: int, path: Path, saved: SaveResult, new: _NewFile, number: int) -> None:
        if self._committed_numbers.get(step, 0) > number:
            # A signal handler saved a later state of this step during this save.
            new.discard()
            self.release_name(path)
            return
        if not self._native.is_claimed:
            # The Checkpointer was closed meanwhile.
            self._lock(secrets.token_hex(16))
        # Those whose saves began later, from a signal handler, are newer.
        newer = [other for other, its_number in self._committed_numbers.items() if its_number > number]
        try:
            settled = self._native.commit(encode_entry(new_checkpoint(step, path, saved)), new, newer)
            self._reserved.pop(path.name, None)
        except BaseException:
            self.release_name(path)
            raise
        finally:
            self.entries = decode_manifest(self.folder, self._native.text)
        listed = {entry.step for entry in self.entries}
        numbers = {**self._committed_numbers, step: number}
        self._committed_numbers = {other: its_number for other, its_number in numbers.items() if other in listed}
        self._warn_about(settled)

    def _commit_shared(
        self, step: int, path: Path, saved: SaveResult, saving: UncommittedFiles, check_wanted: Callable[[], None]
    ) -> None:
        entry = new_checkpoint(step, path, saved, saving.parts)
        failed: list[Exception] = []

        def publish() -> str:
            if not self._group.is_leader:
                return ""
            try:
                self._native.publish(encode_entry(entry, saving.pending))
            except Exception as error:
                if self._native.is_committed(path.name) is False:
                    raise
                failed.append(error)
            return self._native.text

        try:
            self._group.run_on_all(check_wanted)
            text = self._group.run_on_all(publish)[0]
        except BaseException as error:
            # If the others are unreachable they may have gone on, and the leader's manifest may list these files.
            saving.discard() if self._group.is_shared_error(error) else saving.keep()
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
        """Give files their names and remove retired ones, on every machine: folders may not be shared."""

        def settle() -> _Settled | None:
            is_its_turn = self._group.is_leader or self._is_first_here
            return self._native.settle() if is_its_turn else None

        # The leader goes first: in a shared folder, the others then have nothing to do.
        leaders = self._group.run_on_all(lambda: settle() if self._group.is_leader else None)
        others = self._group.run_on_all(lambda: None if self._group.is_leader else settle())
        gathered = [settled for settled in (*leaders, *others) if settled is not None]
        named, removed = (set.intersection(*(set(one[kind]) for one in gathered)) for kind in (2, 3))
        self._native.record_settled(sorted(named), sorted(removed))
        self.entries = decode_manifest(self.folder, self._native.text)
        for settled in gathered if self._group.is_leader else ():
            self._warn_about(settled)

    def _warn_about(self, settled: _Settled) -> None:
        foreign, failures, _, _ = settled
        for name in foreign:
            self._warn_once(
                name, f"{self.folder / name}: this is not the file that was saved under that name; it is kept"
            )
        for failure in failures:
            self._warn_once(failure, f"{self.folder}: {failure}; the next save tries again")

    def _warn_once(self, what: str, text: str) -> None:
        """Issue a warning, unless it was issued before."""
        if what not in self._warned:
            self._warned.add(what)
            warn_caller(text)

    def unlock(self) -> None:
        """Release the lock on the folder."""
        self._native.release()

    def abandon_lock(self) -> None:
        """Leave the lock to the parent process after a fork."""
        self._native.abandon()


# A forked child inherits the open lock file of every instance.
_instances: EndWatch[None] = EndWatch(forgets=True)


def _abandon_all() -> None:
    for history in _instances.living():
        history.abandon_lock()


os.register_at_fork(after_in_child=_abandon_all)
