"""The options of `depths` and `parts`."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(name: str, description: str | None, *, rounds: int) -> argparse.Namespace:
    """Parse ``--rounds`` and ``--scratch`` of ``python -m checkpointbench.NAME``, and create the scratch folder."""
    parser = argparse.ArgumentParser(prog=f"checkpointbench.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    return arguments
