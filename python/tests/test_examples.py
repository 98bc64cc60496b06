"""Run each script of `examples/` as a newcomer does: without arguments, in a folder of its own."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
WALK_THROUGHS = {"larger_than_memory.py"}
LINES_MAX = 60
# Of the processors: other programs share them with the tests, so the clock on the wall says little.
SECONDS_MAX, WALK_THROUGH_SECONDS_MAX = 30, 60


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs(name: str, tmp_path: Path) -> None:
    if "import transformers" in (FOLDER / name).read_text():
        pytest.importorskip("transformers")
    temporary, current = tmp_path / "temporary", tmp_path / "current"
    temporary.mkdir()
    current.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),  # torch makes it, with and without a use for it
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, FOLDER / name], cwd=current, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) >= 4, done.stdout
    assert not re.search(r"equal.*False|same.*False|\bnan\b", done.stdout), done.stdout
    assert not [*temporary.iterdir(), *current.iterdir()], "it leaves files behind"
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < (WALK_THROUGH_SECONDS_MAX if name in WALK_THROUGHS else SECONDS_MAX)


@pytest.mark.parametrize("name", SCRIPTS)
def test_reads_as_a_tutorial(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert name in WALK_THROUGHS or len(text.splitlines()) < LINES_MAX
    assert f"Usage: python examples/{name}" in text
    assert not re.search(r"deepnvme\._|from deepnvme\.", text), "the public API only"
    assert re.search(r'sys\.exit\("This example needs .*pip install', text), "it says what to install"


def test_the_list_is_complete() -> None:
    listed = re.findall(r"^\| \[(\S+\.py)\]\(\1\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == SCRIPTS
