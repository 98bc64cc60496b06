"""Options, the scratch folder and the record, which the commands of all benchmarks share."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import environment

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator


def add_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Add ``--rounds``, ``--scratch`` and ``--results``."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    parser.add_argument("--results", type=Path, default=Path("results"))


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder, and remove it in the end."""
    path = path.absolute()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_in_scratch(folder: Path, run: Callable[[Path], Path]) -> int:
    """Run a benchmark in an empty folder, and print the name of its record. Returns the exit status."""
    with scratch_folder(folder) as scratch:
        path = run(scratch)
    print(f"written: {path.name}")
    return 0


def write_record(results: Path, kind: str, scratch: Path, fields: dict[str, Any]) -> Path:
    """Write a record with the date and the environment, named after the date and the kind. Returns its path."""
    date = time.strftime("%Y-%m-%d")
    record = {"date": date, "environment": environment.describe(scratch), **fields}
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{date}-{kind}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path
