"""``python -m gpubench``: run all rows with tensors on the first GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from gpubench.gpu import RealGpu
from gpubench.rows import Pace
from gpubench.run import run


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="gpubench", description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the tensor and of the model (default: 2048)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=600, help="a row begins no other round after so many (default: 600)"
    )
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpubench: torch {torch.__version__} reaches no GPU here; nothing was measured", file=sys.stderr)
        return 1
    pace = Pace(arguments.rounds, arguments.seconds)
    run(RealGpu(), arguments.scratch, arguments.results, nbytes=arguments.mib << 20, pace=pace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
