"""Thousands of mutations for every reader give the saved state or a typed error with the path, in bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .hostile_inputs import READERS

MUTATIONS = 5000


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that imports torch once, and forks for each reader."""
    log = tmp_path_factory.mktemp("log") / "log"
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-m", "checkpoint.hostile_inputs"]
    with log.open("w") as out:
        child = subprocess.Popen(
            command, cwd=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
        )
    with child:
        yield child, log
        child.kill()


@pytest.mark.parametrize("reader", READERS)
def test_every_mutation_is_harmless(tmp_path: Path, attacker: tuple[subprocess.Popen[str], Path], reader: str) -> None:
    child, log = attacker
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps([reader, str(tmp_path), MUTATIONS]) + "\n")
    child.stdin.flush()
    assert child.stdout.readline() == "0\n", log.read_text()[-6000:]
