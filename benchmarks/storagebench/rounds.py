"""Alternating rounds: every contestant once in each round, the order turned and reversed round after round."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from storagebench.contestants.base import NotOffered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storagebench.contestants.base import Contestant
    from storagebench.measure import Sample
    from storagebench.rows.base import Row

_Any = TypeVar("_Any")


@dataclass
class RowResult:
    """All samples of one row: for each contestant one sample in each counted round."""

    row: Row
    contestants: list[Contestant]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def complete(self) -> list[Contestant]:
        """Return the contestants that took part in every round."""
        return [one for one in self.contestants if one.name in self.samples]


def order(contestants: Sequence[_Any], round_index: int) -> list[_Any]:
    """Return who comes when: turned by one each round, and backwards in every other round.

    Turning alone would leave each contestant behind the same predecessor, and with it what that one leaves on
    the disk.
    """
    turned = round_index % max(1, len(contestants))
    line = [*contestants[turned:], *contestants[:turned]]
    return line[::-1] if round_index % 2 else line


def run_row(row: Row, contestants: Sequence[Contestant], rounds: int) -> RowResult:
    """Run one uncounted round that verifies every byte, then `rounds` counted ones.

    A contestant that cannot do the work is left out with its reason; one that fails is left out with its
    failure, and the others go on.
    """
    result = RowResult(row, list(contestants))
    counted: dict[str, list[Sample]] = {one.name: [] for one in contestants}
    row.prepare()
    try:
        for round_index in range(rounds + 1):
            for contestant in order(contestants, round_index):
                if contestant.name in result.left_out or contestant.name in result.failed:
                    continue
                sample = _measure(result, contestant, every_byte=round_index == 0)
                if sample is not None and round_index > 0:
                    counted[contestant.name].append(sample)
                    _progress(row, contestant, round_index, sample)
    finally:
        row.close()
    result.samples = {name: samples for name, samples in counted.items() if len(samples) == rounds}
    return result


def _measure(result: RowResult, contestant: Contestant, *, every_byte: bool) -> Sample | None:
    try:
        return result.row.once(contestant, every_byte=every_byte)
    except NotOffered as reason:
        result.left_out[contestant.name] = str(reason)
    except Exception as error:  # noqa: BLE001 - whatever a rival throws must not end the others' run
        if not isinstance(error, (OSError, RuntimeError)):
            traceback.print_exc()
        result.failed[contestant.name] = f"{type(error).__name__}: {error}"
    what, reasons = (
        ("left out", result.left_out) if contestant.name in result.left_out else ("FAILED", result.failed)
    )
    print(f"{result.row.key}: {what}: {contestant.name}: {reasons[contestant.name]}", file=sys.stderr)
    return None


def _progress(row: Row, contestant: Contestant, round_index: int, sample: Sample) -> None:
    print(
        f"{row.key:18} round {round_index}  {contestant.name:28} {row.figure(sample):10.2f} {row.unit}",
        file=sys.stderr,
        flush=True,
    )
