"""The bodies of the fuzz targets in Python, over their seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SEEDS = Path(__file__).parents[3] / "fuzz" / "seeds"
TARGETS = [
    "objects", "distributed", "shard_checksums", "optimizer_state", "checkpoints", "model_config", "packed_table",
    "trace",
]  # fmt: skip
PROGRAM = """
import pathlib, sys
tests, seeds, name = map(pathlib.Path, sys.argv[1:])
sys.path[:0] = [str(tests), str(tests / "shared")]
from fuzz import targets
body = targets.TARGETS[name.name](pathlib.Path.cwd(), targets.Watch(pathlib.Path.cwd()))
paths = sorted(seeds.iterdir())
assert paths
for path in paths:
    print(path)
    body(path.read_bytes())
"""


@pytest.mark.parametrize("target", TARGETS)
def test_a_reader_is_safe_with_every_seed(python_fork: Callable[..., object], target: str) -> None:
    if target == "model_config":
        pytest.importorskip("transformers")
    python_fork(PROGRAM, Path(__file__).parents[1], SEEDS / target, target)
