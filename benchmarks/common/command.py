"""Options, the scratch folder and the record, which the commands of all benchmarks share."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
    add_rounds_and_scratch(parser, rounds=rounds)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the records")


def add_rounds_and_scratch(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Add ``--rounds`` and ``--scratch``, for a benchmark without a record."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds (default: {rounds})")
    parser.add_argument("--scratch", type=Path, default=Path("scratch"), help="folder on the disk to measure")


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make a new folder ``.NAME-...`` in `parent`, and remove it in the end. Existing files are never touched."""
    parent = parent.absolute()
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_in_scratch(parent: Path, name: str, run: Callable[[Path], Path]) -> int:
    """Run a benchmark in a new folder, and print the path of its record. Returns the exit status."""
    with scratch_folder(parent, name) as scratch:
        path = run(scratch)
    print(f"written: {path}")
    return 0


def write_record(results: Path, kind: str, scratch: Path, fields: dict[str, Any]) -> Path:
    """Write a record with the date and the environment, named after the date and the kind. Returns its path."""
    date = time.strftime("%Y-%m-%d")
    record = {"date": date, "environment": environment.describe(scratch), **fields}
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{date}-{kind}.json"
    write_json(path, record)
    return path


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Replace a file by a record. An interrupted call leaves the former file."""
    private = path.with_suffix(f".{os.getpid()}.tmp")
    private.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    private.replace(path)
