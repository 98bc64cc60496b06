"""``python -m casebench``: each case with all tools in alternating rounds, and which goals are reached.

The record has every round. fio and safetensors must be installed. The Run:ai streamer is left out, with its goals,
if it is not installed.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import TYPE_CHECKING

import torch

from casebench.cases import CASES
from common import command
from common.disk_idle import idle_disk
from common.round_order import order

if TYPE_CHECKING:
    from pathlib import Path

    from casebench.cases import Case
    from common.disk_idle import DiskIdleProbe


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="casebench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(parser, rounds=7)
    parser.add_argument("--mib", type=int, default=2048, help="size of the large tensors (2048)")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases whose names have one of these")
    return parser.parse_args()


def run(case: Case, folder: Path, rounds: int, mib: int, disk: DiskIdleProbe) -> dict[str, list[float]]:
    """Run a case: one round that does not count, then alternating ones. Returns the seconds of each tool."""
    with case.prepare(folder, mib) as tools:
        took: dict[str, list[float]] = {name: [] for name in tools}
        disk.wait()
        for index in range(rounds + 1):
            for name in order(list(tools), index):
                # A turn that wrote leaves the disk busy.
                if case.writes:
                    disk.wait()
                one = tools[name]()
                if index:
                    took[name].append(one)
    return took


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the median, lowest and highest of our times divided by theirs, round by round: below 1 is faster."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return median(ratios), min(ratios), max(ratios)


def report(name: str, case: Case, took: dict[str, list[float]]) -> list[dict[str, object]]:
    """Print the times and the goals of a case. Returns the goals for the record."""
    print(f"{name}: {(case.prepare.__doc__ or '').strip()}")
    for tool, seconds in took.items():
        print(f"  {tool:24} {median(seconds):.3g} s ({min(seconds):.3g} to {max(seconds):.3g})")
    goals: list[dict[str, object]] = []
    for goal in case.goals:
        if goal.theirs not in took:
            continue
        middle, low, high = ratio(took[goal.ours], took[goal.theirs])
        verdict = "reached" if middle <= goal.most else "BEHIND"
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"  {goal.ours} / {goal.theirs}: {spread}, at most {goal.most:.2f}: {verdict}")
        goals.append({**goal._asdict(), "ratio": middle, "low": low, "high": high, "verdict": verdict})
    return goals


def main() -> int:
    """Run the cases and write the record."""
    chosen = arguments()
    torch.set_num_threads(os.cpu_count() or 1)
    made = {}
    with command.scratch_folder(chosen.scratch, "cases") as scratch:
        with idle_disk(scratch) as disk:
            for name, case in CASES.items():
                if chosen.only and not any(text in name for text in chosen.only):
                    continue
                with command.scratch_folder(scratch, "case") as folder:
                    took = run(case, folder, chosen.rounds, chosen.mib, disk)
                made[name] = {"seconds": took, "goals": report(name, case, took)}
        fields = {"load": os.getloadavg()[0], "rounds": chosen.rounds, "mib": chosen.mib, "cases": made}
        print(f"written: {command.write_record(chosen.results, 'cases', scratch, fields)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
