"""``python -m trainbench``: measure steps with optimizer state on disk, or with parameters on disk."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import closing
from pathlib import Path

from common import command, hugepages, verdict
from common.disk_idle import idle_disk
from swapbench.fio_mixed import HUGE_BYTES, best_of_fio
from trainbench import summary, tools
from trainbench.offloaded import TOKENS, Size
from trainbench.rounds import Bench, Row

# Row: whether parameters are bf16.
_STEPS = {"step-fp32": False, "step-bf16": True}
# Row: batch entries, and whether parameters are updated in the backward pass.
_OFFLOAD = {
    "offload-disk": (1, False),
    "offload-disk-in-backward": (1, True),
    "offload-compute": (64, False),
    "offload-compute-in-backward": (64, True),
}
_ROWS = (*_STEPS, *_OFFLOAD)
_QUICK_ROWS = "step-fp32,offload-disk,offload-disk-in-backward"
_QUICK_ELEMENTS, _QUICK_ROUNDS, _QUICK_SIZE = 16_000_000, 1, Size(256, 24)
_MIB = 1 << 20


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="trainbench", description=__doc__)
    parser.add_argument("--rows", help=f"some of {', '.join(_ROWS)} (default: all)")
    command.add_options(parser, rounds=5)
    parser.add_argument("--elements", type=int, default=500_000_000, help="number of parameters")
    parser.add_argument("--steps", type=int, default=2, help="consecutive steps per turn")
    parser.add_argument("--width", type=int, default=1024, help="width of the model whose parameters are on disk")
    parser.add_argument("--blocks", type=int, default=24, help="number of its blocks")
    parser.add_argument("--without", default="", help="tools to leave out, separated by semicolons")
    parser.add_argument("--quick", action="store_true", help="a smoke test; speeds mean little")
    chosen = parser.parse_args()
    chosen.rows = chosen.rows or (_QUICK_ROWS if chosen.quick else ",".join(_ROWS))
    if chosen.quick:
        chosen.elements, chosen.rounds = _QUICK_ELEMENTS, _QUICK_ROUNDS
        chosen.width, chosen.blocks = _QUICK_SIZE.width, _QUICK_SIZE.blocks
    unknown = set(chosen.rows.split(",")) - set(_ROWS)
    if unknown:
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are {', '.join(_ROWS)}")
    return chosen


def run(chosen: argparse.Namespace, scratch: Path) -> Path:
    """Measure all rows, and write the record after each."""
    size = Size(chosen.width, chosen.blocks)
    wanted = {name: one for name, one in tools.ALL.items() if name not in chosen.without.split(";")}
    nbytes = max(8 * chosen.elements, size.parameter_bytes) // _MIB * _MIB
    rows: list[Row] = []
    with hugepages.reserved(HUGE_BYTES) as is_huge, idle_disk(scratch) as disk:
        best, trials = best_of_fio(scratch / "mixed", nbytes, disk, is_huge=is_huge)
        with closing(Bench(scratch, disk, best, chosen.rounds, chosen.steps, wanted, chosen.quick)) as bench:
            for key in chosen.rows.split(","):
                if key in _STEPS:
                    rows.append(bench.steps_row(key, chosen.elements, is_16_bit=_STEPS[key]))
                else:
                    batch, in_backward = _OFFLOAD[key]
                    rows.append(bench.offload_row(key, size, batch, in_backward=in_backward))
                print(summary.table(rows[-1]), flush=True)
                fields = {
                    "load": os.getloadavg()[0],
                    "fio": {"best": str(best), "trials": trials, "file_bytes": nbytes},
                    "rounds": chosen.rounds,
                    "steps": chosen.steps,
                    "tokens": TOKENS,
                    "took_no_part": [name for name in chosen.without.split(";") if name],
                    "chosen": bench.chosen,
                    "rows": [summary.row_to_json(row) for row in rows],
                }
                kind = "train-quick" if chosen.quick else "train"
                path = command.write_record(chosen.results, kind, scratch, fields)
    for row in rows:
        verdict.print_recorded(summary.verdicts(row))
    return path


def main() -> int:
    """Parse the options, measure, and write the record, if fio is installed."""
    chosen = arguments()
    if shutil.which("fio") is None:
        print("skipped: fio is not installed, and there is nothing to compare with")
        return 0
    return command.run_in_scratch(chosen.scratch, "train", lambda scratch: run(chosen, scratch))


if __name__ == "__main__":
    sys.exit(main())
