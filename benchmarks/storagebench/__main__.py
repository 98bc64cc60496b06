"""``python -m storagebench``: run all rows, or some of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common import command, environment, hugepages
from storagebench import plot, record, registry, settings, table, targets
from storagebench.rounds import RowResult, run_row
from storagebench.rows import calls, large, small
from storagebench.rows.base import Bench, Row
from storagebench.summary import summarise
from storagebench.tools import fio_job

ROWS: tuple[type[Row], ...] = (
    large.WriteNewPinned,
    large.WriteOverPinned,
    large.ReadPinned,
    large.WriteNewPlain,
    large.ReadPlain,
    large.ReadFresh,
    small.SmallRead,
    small.SmallWrite,
    calls.SmallCall,
    calls.InFlight,
)


def main() -> int:
    """Run the requested rows. Returns 1 if deepnvme failed in one of them."""
    arguments = _arguments()
    rows = _rows(arguments.rows)
    with command.scratch_folder(arguments.scratch, "storagebench") as scratch:
        return _run(arguments, rows, scratch)


def _run(arguments: argparse.Namespace, rows: list[type[Row]], scratch: Path) -> int:
    size = settings.fitting_bytes(arguments.mib * settings.MIB, scratch)
    if size < arguments.mib * settings.MIB:
        print(f"memory or disk is short: {size // settings.MIB} MiB instead of {arguments.mib}", file=sys.stderr)
    make = settings.quick if arguments.quick else settings.full
    bench = Bench(make(arguments.rounds, size), scratch)
    with hugepages.reserved(fio_job.buffer_bytes_max(bench.settings)):
        return _measure(bench, rows, arguments)


def _measure(bench: Bench, rows: list[type[Row]], arguments: argparse.Namespace) -> int:
    tools = registry.assemble(bench)
    results: list[RowResult] = []
    path = Path()
    try:
        for row_type in rows:
            row = row_type(bench)
            results.append(run_row(row, tools.of(row.group), arguments.rounds))
            print(table.render(summarise(results[-1]), results[-1]), flush=True)
            # Written after every row: a crash loses only the current one.
            path = record.write(
                arguments.results,
                "quick" if arguments.quick else arguments.rows.replace(",", "+"),
                settings=bench.settings,
                environment=environment.describe(bench.scratch),
                registry=tools,
                results=results,
                verdicts=targets.judge(results),
            )
    finally:
        tools.close()
        bench.close()
    _finish(path, results, tools)
    return int(any(name.startswith("deepnvme") for result in results for name in result.failed))


def _finish(path: Path, results: list[RowResult], tools: registry.Registry) -> None:
    print("\nTargets")
    for verdict in targets.judge(results):
        print(f"  {verdict}")
    for name, reason in tools.missing.items():
        print(f"skipped: {name}: {reason}")
    print("\nwritten:", ", ".join(str(file) for file in [path, *plot.draw(path)]))


def _rows(names: str) -> list[type[Row]]:
    words = names.split(",")
    known = {"all", *(row.group for row in ROWS), *(row.key for row in ROWS)}
    unknown = [word for word in words if word not in known]
    if unknown:
        raise SystemExit(f"--rows: unknown {', '.join(unknown)}; choose from {', '.join(sorted(known))}")
    return [row for row in ROWS if {"all", row.group, row.key} & set(words)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="storagebench", description=__doc__)
    parser.add_argument("--rows", default="all", help="all, large, small, calls, or row names, separated by commas")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    parser.add_argument("--mib", type=int, default=2048, help="size of the large tensor in MiB (default 2048)")
    parser.add_argument("--scratch", type=Path, default=Path("scratch"), help="folder on the disk to measure")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the records")
    parser.add_argument("--quick", action="store_true", help="small counts and sweeps: a smoke test")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.mib < 1:
        parser.error("--rounds and --mib are at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
