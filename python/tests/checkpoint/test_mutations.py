"""Thousands of mutations for every reader give the saved state or a typed error with the path, in bounded time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .hostile_inputs import READERS

MUTATIONS = 5000

# In memory if possible: the mutations are of parsers, and a disk takes more time for each file than they do.
PROGRAM = """
import os, pathlib, sys, tempfile, warnings
tests, reader, mutations = sys.argv[1:]
sys.path[:0] = [tests, tests + "/shared"]
from checkpoint import hostile_inputs
warnings.simplefilter("ignore")
memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "."
with tempfile.TemporaryDirectory(dir=memory) as folder:
    os.chdir(folder)
    hostile_inputs.attack(reader, pathlib.Path.cwd(), int(mutations))
"""


@pytest.mark.parametrize("reader", READERS)
def test_every_mutation_is_harmless(python_fork: Callable[..., object], reader: str) -> None:
    python_fork(PROGRAM, Path(__file__).parent.parent, reader, MUTATIONS)
