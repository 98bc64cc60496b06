"""``python -m perfcheck``: compare short cases with the ratios on record for this kind of machine.

Each case runs in alternating rounds with its baseline. A case has fallen if its median ratio is below all ratios
on record, and all its ratios are below the median on record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

import torch

from common import command, environment
from common.disk_idle import DiskIdleProbe, idle_disk
from common.round_order import order
from perfcheck import record
from perfcheck.cases import CASES

if TYPE_CHECKING:
    from pathlib import Path

_ROUNDS = 5


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="perfcheck", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(parser, rounds=_ROUNDS)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases whose names have one of these")
    parser.add_argument("--record", action="store_true", help="write the ratios, instead of comparing with them")
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON")
    return parser.parse_args()


def run(name: str, folder: Path, rounds: int, disk: DiskIdleProbe) -> dict[str, list[float]]:
    """Run a case: one round that does not count, then alternating ones. Returns the seconds."""
    case = CASES[name]
    took: dict[str, list[float]] = {"ours": [], "theirs": []}
    with case.prepare(folder) as tools:
        disk.wait()
        for index in range(rounds + 1):
            for who in order(list(took), index):
                # A turn that wrote leaves the disk busy.
                if case.writes:
                    disk.wait()
                one = getattr(tools, who)()
                if index:
                    took[who].append(one)
    return took


def chosen_cases(only: list[str]) -> list[str]:
    """Return the names of the cases that run here."""
    names = [name for name in CASES if not only or any(text in name for text in only)]
    if shutil.which("fio") is None:
        print("fio is not installed: its cases are left out", file=sys.stderr)
        names = [name for name in names if not CASES[name].needs_fio]
    return names


def main() -> int:
    """Run the cases, and compare or record. Returns 1 if one has fallen."""
    chosen = arguments()
    torch.set_num_threads(os.cpu_count() or 1)
    path = chosen.results / "perf-check.json"
    began, rounds, now = time.monotonic(), {}, {}
    with command.scratch_folder(chosen.scratch, "perf-check") as scratch:
        described = environment.describe(scratch)
        kind = record.kind_of_machine(described)
        before = {} if chosen.record else record.read(path, kind)
        fallen = []
        with idle_disk(scratch) as disk:
            for name in chosen_cases(chosen.only):
                with command.scratch_folder(scratch, "case") as folder:
                    rounds[name] = run(name, folder, chosen.rounds, disk)
                now[name] = record.Ratios.of(rounds[name]["ours"], rounds[name]["theirs"])
                line = f"{name:36} {now[name]!s:24}"
                if (was := before.get(name)) is not None:
                    line += f" was {was}"
                    if record.has_fallen(now[name], was):
                        fallen.append(name)
                        line += "  FALLEN"
                print(line, file=sys.stderr if chosen.json else sys.stdout, flush=True)
    if chosen.json:
        print(json.dumps({"kind": kind, "seconds": rounds, "fallen": fallen}, indent=1))
    if chosen.record:
        fields = {"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0], "environment": described}
        record.write(path, kind, {**fields, "seconds": rounds}, now)
    elif not before:
        print(f"nothing is on record for this kind of machine ({kind}); --record writes it", file=sys.stderr)
    print(f"{time.monotonic() - began:.0f} s; {len(fallen)} of {len(now)} cases have fallen", file=sys.stderr)
    return 1 if fallen else 0


if __name__ == "__main__":
    raise SystemExit(main())
