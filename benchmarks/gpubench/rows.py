"""A row: tools that do the same work in alternating rounds, each verified."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import cache
from common.measure import Sample
from common.round_order import order
from gpubench.tool import Setup, reason


@dataclass
class RowResult:
    """The result of a row: its samples, and the skipped tools."""

    key: str
    title: str = ""
    #: The tool of deepnvme to which the baselines are compared.
    ours: str = ""
    #: The tool that shows the speed to reach, if the row has one: to host memory, or without the disk.
    reference: str = ""
    #: Baselines that are compared to another tool of deepnvme than `ours`, with the name of that tool.
    counterparts: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    #: The group of each tool by its name, also of tools that are left out.
    groups: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: Results of a row without samples.
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Why the whole row failed, and the stacks of its threads if it was killed.
    failure: str = ""
    stacks: str = ""
    #: Why the row cannot run here.
    not_offered: str = ""
    #: The current turn, its tool, and its start on the system's monotonic clock.
    activity: str = "preparing"
    tool: str = ""
    since: float = field(default_factory=time.monotonic)

    def begin(self, activity: str, tool: str = "") -> None:
        """Name the current turn, for the case that it never ends."""
        self.activity, self.tool, self.since = activity, tool, time.monotonic()

    def drop(self, name: str, why: str) -> None:
        """Skip a tool, and drop its samples."""
        print(f"{self.key}: left out: {name}: {why}", file=sys.stderr)
        self.left_out[name] = why
        self.samples.pop(name, None)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text and text not in self.notes:
            self.notes.append(text)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RowResult:
        """Return the row that `to_json` described."""
        samples = {name: [Sample(**fields) for fields in found] for name, found in values["samples"].items()}
        return cls(**{**values, "samples": samples})


def _save_nothing(_: RowResult) -> None:
    pass


@dataclass(frozen=True)
class RoundLimits:
    """How many rounds are counted, and after how many seconds a row begins no other one.

    A turn is one round of a tool, or its construction or close.
    """

    rounds: int
    rounds_s: float
    #: Called before each turn, to save the row.
    save: Callable[[RowResult], None] = _save_nothing


def construct(row: RowResult, kinds: Sequence[Any], setup: Setup, limits: RoundLimits) -> list[Any]:
    """Construct the tools of a row that run here. The others are left out with the reason."""
    row.groups = {kind.name: kind.group for kind in kinds}
    found: list[Any] = []
    for kind in kinds:
        if kind.name in row.left_out:
            continue
        row.begin(f"constructing {kind.name}", kind.name)
        limits.save(row)
        try:
            found.append(kind(setup))
        except Exception as error:  # noqa: BLE001 - any error of a baseline is a reason
            row.drop(kind.name, reason(error))
    row.begin("preparing")
    limits.save(row)
    return found


#: The first round, with its trials, may take this multiple of `rounds_s`; later turns are left out.
_FIRST_ROUND = 1.5


def run_rounds(
    row: RowResult, tools: Sequence[Any], limits: RoundLimits, once: Callable[[Any, bool], Sample]
) -> RowResult:
    """Run every tool once in each round; the first round is not counted."""
    start = time.monotonic()
    end, first_end = start + limits.rounds_s, start + limits.rounds_s * _FIRST_ROUND
    for index in range(limits.rounds + 1):
        if index > 1 and time.monotonic() > end:
            row.note(f"{index - 1} of {limits.rounds} rounds: the time was over")
            break
        for one in order([one for one in tools if one.name not in row.left_out], index):
            if index == 0 and time.monotonic() > first_end and one.name not in (row.ours, row.reference):
                row.drop(one.name, "the time of its row was over before its turn")
                continue
            row.begin(f"{one.name}, round {index}", one.name)
            limits.save(row)
            try:
                sample = once(one, index == 0)
            except Exception as error:  # noqa: BLE001 - an error of a baseline must not end the others' run
                row.drop(one.name, reason(error))
                continue
            row.settings[one.name] = one.settings()
            if index > 0:
                row.samples.setdefault(one.name, []).append(sample)
                print(f"{row.key:10} round {index}  {one.name:40} {sample.gb_per_s:7.2f} GB/s", file=sys.stderr)
    for one in tools:
        row.begin(f"closing {one.name}", one.name)
        limits.save(row)
        try:
            one.close()
        except Exception as error:  # noqa: BLE001 - the other tools must be closed
            row.note(f"{one.name} failed to close: {reason(error)}")
    row.begin("done")
    limits.save(row)
    return row


def make_cold_or_note(path: Path, row: RowResult) -> None:
    """Drop the file from the page cache. If that fails, the row gets a note."""
    try:
        cache.make_cold(path)
    except (OSError, RuntimeError) as error:
        if not any(note.startswith("reads may be warm") for note in row.notes):
            row.note(f"reads may be warm: {reason(error)}")
