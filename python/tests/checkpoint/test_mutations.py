"""Thousands of mutations for every reader give the saved state or a typed error with the path, in bounded time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .hostile_inputs import READERS

MUTATIONS = 5000

PROGRAM = """
import pathlib, sys, warnings
tests, reader, mutations = sys.argv[1:]
sys.path.insert(0, tests)
from checkpoint import hostile_inputs
warnings.simplefilter("ignore")
hostile_inputs.attack(reader, pathlib.Path.cwd(), int(mutations))
"""


@pytest.mark.parametrize("reader", READERS)
def test_every_mutation_is_harmless(python_fork: Callable[..., object], reader: str) -> None:
    python_fork(PROGRAM, Path(__file__).parent.parent, reader, MUTATIONS)
