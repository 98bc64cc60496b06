"""The checkpoints of a folder: what counts, how a new one is called, and which of them stay."""

from __future__ import annotations

import datetime as dt
from itertools import count
from typing import TYPE_CHECKING

from deepnvme._checkpoint import manifest
from deepnvme._checkpoint.manifest import Checkpoint
from deepnvme._deepnvme import __version__

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal


class Retained:
    """What the manifest of a folder lists, and how that changes: at one instant, the replacement of the manifest."""

    def __init__(self, folder: Path, keep: int | None, durability: Literal["none", "data", "full"]) -> None:
        if keep is not None and keep < 1:
            msg = f"keep is {keep}; at least 1 checkpoint stays, or all with None"
            raise ValueError(msg)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._keep = keep
        self._durability: Literal["none", "data", "full"] = durability
        self.entries = manifest.read(folder)

    def find(self, step: int | None) -> Checkpoint:
        """Give the checkpoint of a step, or the newest."""
        found = [entry for entry in self.entries if step is None or entry.step == step]
        if not found:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            steps = ", ".join(str(entry.step) for entry in self.entries) or "none"
            msg = f"{self._folder}: there is {what}; those that are there: {steps}"
            raise FileNotFoundError(msg)
        return found[-1]

    def new_path(self, step: int, suffix: str) -> Path:
        """Give a name that no file has: what the manifest lists stays what it is until the manifest is another one."""
        paths = (self._folder / manifest.file_name(step, suffix, again) for again in count())
        return next(path for path in paths if not path.exists())

    def commit(self, step: int, path: Path, saved: tuple[int, int, int, int]) -> None:
        """Count a file that is whole and on the disk, and remove those that do not count any more."""
        import torch  # noqa: PLC0415

        nbytes, offset, index_nbytes, crc64 = saved
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        new = Checkpoint(
            step, path, nbytes, now, offset, index_nbytes, f"{crc64:016x}", str(torch.__version__), __version__
        )
        entries = staying(self.entries, new, self._keep)
        manifest.write(self._folder, entries, self._durability)
        self.entries = entries
        manifest.remove_others(self._folder, entries)


def staying(entries: list[Checkpoint], new: Checkpoint, keep: int | None) -> list[Checkpoint]:
    """Say which stay: the last ones, and the new one, also where its step is not the highest."""
    others = [entry for entry in entries if entry.step != new.step]
    if keep is not None:
        others = others[max(len(others) - (keep - 1), 0) :]
    return sorted([*others, new], key=lambda entry: entry.step)
