"""Measure the tools of a row in alternating rounds: every tool once in each round."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.not_offered import NotOffered
from common.round_order import order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.measure import Sample
    from storagebench.rows.base import Row
    from storagebench.tools.base import Tool


@dataclass
class RowResult:
    """All samples of one row: for each tool one sample in each counted round."""

    row: Row
    tools: list[Tool]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def complete(self) -> list[Tool]:
        """Return the tools that took part in every round."""
        return [one for one in self.tools if one.name in self.samples]


def run_row(row: Row, tools: Sequence[Tool], rounds: int) -> RowResult:
    """Run one uncounted round that verifies every byte, then `rounds` counted ones.

    A tool that does not support the work or fails is skipped with the reason, and the others continue.
    """
    result = RowResult(row, list(tools))
    counted: dict[str, list[Sample]] = {one.name: [] for one in tools}
    row.prepare()
    try:
        for round_index in range(rounds + 1):
            for tool in order(tools, round_index):
                if tool.name in result.left_out or tool.name in result.failed:
                    continue
                sample = _measure(result, tool, every_byte=round_index == 0)
                if sample is not None and round_index > 0:
                    counted[tool.name].append(sample)
                    _progress(row, tool, round_index, sample)
    finally:
        row.close()
    result.samples = {name: samples for name, samples in counted.items() if len(samples) == rounds}
    return result


def _measure(result: RowResult, tool: Tool, *, every_byte: bool) -> Sample | None:
    try:
        return result.row.once(tool, every_byte=every_byte)
    except NotOffered as reason:
        result.left_out[tool.name] = str(reason)
    except Exception as error:  # noqa: BLE001 - the error of one tool must not end the run
        if not isinstance(error, (OSError, RuntimeError)):
            traceback.print_exc()
        result.failed[tool.name] = f"{type(error).__name__}: {error}"
    what, reasons = ("left out", result.left_out) if tool.name in result.left_out else ("FAILED", result.failed)
    print(f"{result.row.key}: {what}: {tool.name}: {reasons[tool.name]}", file=sys.stderr)
    return None


def _progress(row: Row, tool: Tool, round_index: int, sample: Sample) -> None:
    print(
        f"{row.key:18} round {round_index}  {tool.name:28} {row.metric(sample):10.2f} {row.unit}",
        file=sys.stderr,
        flush=True,
    )
