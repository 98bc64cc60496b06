"""``python -m gpubench``: run all rows with tensors on the first GPU."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch

from gpubench.run import Plan, run
from gpubench.work import KEYS


def main() -> int:
    """Run the requested rows. Exit status: 0 if every row passed or was left out, 1 if one failed."""
    parser = argparse.ArgumentParser(prog="gpubench", description=__doc__)
    every = ",".join(KEYS)
    parser.add_argument("--rows", default=every, help=f"rows to run, separated by commas (default: {every})")
    parser.add_argument("--mib", type=int, default=2048, help="size of tensor, weights and state (default: 2048)")
    parser.add_argument("--model-mib", type=int, help="size of the streamed model (default: 1024, at most --mib)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=60, help="a row begins its last round before this time (default: 60)"
    )
    parser.add_argument("--minutes", type=float, default=16, help="limit of all rows together (default: 16)")
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--rehearse", action="store_true", help="use the tests' fake driver; speeds mean nothing")
    arguments = parser.parse_args()
    if arguments.model_mib is None:
        arguments.model_mib = min(1024, arguments.mib)
    if min(arguments.mib, arguments.model_mib, arguments.rounds) < 1:
        parser.error("--mib, --model-mib and --rounds must be at least 1")
    keys = arguments.rows.split(",")
    if unknown := [key for key in keys if key not in KEYS]:
        parser.error(f"no rows are named {', '.join(unknown)}; there are {', '.join(KEYS)}")
    if not arguments.rehearse and not torch.cuda.is_available():
        print(f"gpubench: torch {torch.__version__} reaches no GPU here; nothing was measured", file=sys.stderr)
        return 1
    # The process of the current row is killed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    plan = Plan(
        nbytes=arguments.mib << 20,
        model_nbytes=arguments.model_mib << 20,
        rounds=arguments.rounds,
        rounds_s=arguments.seconds,
        minutes=arguments.minutes,
        keys=keys,
        is_rehearsal=arguments.rehearse,
    )
    record = run(plan, arguments.scratch, arguments.results)
    return 1 if any(outcome["status"] == "failed" for outcome in record["outcomes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
