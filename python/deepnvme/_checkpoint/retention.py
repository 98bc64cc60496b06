"""The checkpoints of a folder: what counts, how a new one is called, and which of them stay."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from deepnvme._checkpoint import manifest
from deepnvme._checkpoint.manifest import Checkpoint
from deepnvme._deepnvme import __version__

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from deepnvme._checkpoint.distributed import Team
    from deepnvme._checkpoint.manifest import Part


class Retained:
    """What the manifest of a folder lists, and how that changes: at one instant, the replacement of the manifest.

    Of several processes the leader reads and writes it, and the others know what it says.
    """

    def __init__(self, folder: Path, keep: int | None, durability: Literal["none", "data", "full"], team: Team) -> None:
        if keep is not None and keep < 1:
            msg = f"keep is {keep}; at least 1 checkpoint stays, or all with None"
            raise ValueError(msg)
        self.folder = folder
        self._keep = keep
        self._durability: Literal["none", "data", "full"] = durability
        self._team = team
        self.entries = self._own(team.agree(self._read)[0])

    def _read(self) -> list[Checkpoint]:
        # Also where the leader's folder is not this one: parts go there.
        self.folder.mkdir(parents=True, exist_ok=True)
        return manifest.read(self.folder) if self._team.is_leader else []

    def _own(self, entries: list[Checkpoint]) -> list[Checkpoint]:
        """Give the leader's list, with the paths that this process has for the files."""
        return [replace(entry, path=self.folder / entry.path.name) for entry in entries]

    def find(self, step: int | None) -> Checkpoint:
        """Give the checkpoint of a step, or the newest."""
        found = [entry for entry in self.entries if step is None or entry.step == step]
        if not found:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            steps = ", ".join(str(entry.step) for entry in self.entries) or "none"
            msg = f"{self.folder}: there is {what}; those that are there: {steps}"
            raise FileNotFoundError(msg)
        return found[-1]

    def new_path(self, step: int, suffix: str) -> Path:
        """Give a name that no file has: what the manifest lists stays what it is until the manifest is another one."""
        paths = (self.folder / manifest.file_name(step, suffix, again) for again in count())
        return next(path for path in paths if not path.exists())

    def commit(self, step: int, path: Path, saved: tuple[int, int, int, int], parts: tuple[Part, ...] = ()) -> None:
        """Count a file that is whole and on the disk, and remove those that do not count any more."""

        def write() -> list[Checkpoint]:
            return self._write(step, path, saved, parts) if self._team.is_leader else []

        def remove() -> None:
            # Folders of other machines may be others: each looks after its own.
            if self._team.is_leader or self._team.is_first_of_host:
                manifest.remove_others(self.folder, self.entries)

        self.entries = self._own(self._team.agree(write)[0])
        self._team.agree(remove)

    def _write(
        self, step: int, path: Path, saved: tuple[int, int, int, int], parts: tuple[Part, ...]
    ) -> list[Checkpoint]:
        import torch  # noqa: PLC0415

        nbytes, offset, index_nbytes, crc64 = saved
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        new = Checkpoint(
            step, path, nbytes, now, offset, index_nbytes, f"{crc64:016x}", str(torch.__version__), __version__, parts
        )
        entries = staying(self.entries, new, self._keep)
        manifest.write(self.folder, entries, self._durability)
        return entries


def staying(entries: list[Checkpoint], new: Checkpoint, keep: int | None) -> list[Checkpoint]:
    """Say which stay: the last ones, and the new one, also where its step is not the highest."""
    others = [entry for entry in entries if entry.step != new.step]
    if keep is not None:
        others = others[max(len(others) - (keep - 1), 0) :]
    return sorted([*others, new], key=lambda entry: entry.step)
