"""The options of `depths`, `parts` and `small`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from common import command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def run(name: str, description: str | None, measure: Callable[[int, Path], None], *, rounds: int) -> int:
    """Run ``python -m checkpointbench.NAME``: call `measure` with the number of rounds and a new scratch folder."""
    parser = argparse.ArgumentParser(prog=f"checkpointbench.{name}", description=description)
    command.add_rounds_and_scratch(parser, rounds=rounds)
    arguments = parser.parse_args()
    with command.scratch_folder(arguments.scratch, name) as scratch:
        measure(arguments.rounds, scratch)
    return 0
