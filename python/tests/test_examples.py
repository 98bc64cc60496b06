"""Run each script of `examples/` as a newcomer does: without arguments, in a folder of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

if TYPE_CHECKING:
    from forked_python import ForkedPython

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
WALK_THROUGHS = {"larger_than_memory.py"}
LINES_MAX = 60
# Of the CPUs: other programs share them with the tests, so the clock on the wall says little.
SECONDS_MAX, WALK_THROUGH_SECONDS_MAX = 30, 60
LIMIT_S = 200


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs(name: str, tmp_path: Path, forked: ForkedPython) -> None:
    for library in re.findall(r"^    import (\w+)$", (FOLDER / name).read_text(), re.MULTILINE):
        pytest.importorskip(library)
    if "transformers.Trainer" in (FOLDER / name).read_text():
        pytest.importorskip("accelerate")
    temporary, current = tmp_path / "temporary", tmp_path / "current"
    temporary.mkdir()
    current.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),  # torch makes it, with and without a use for it
    }  # fmt: skip
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    pid = forked.start(
        FOLDER / name, folder=current, environment=environment, stdout=stdout, stderr=stderr, seconds=LIMIT_S
    )
    status, seconds, _ = forked.wait(pid)
    assert status == 0, stderr.read_text()[-3000:]
    printed = stdout.read_text()
    assert len(printed.splitlines()) >= 4, printed
    assert not re.search(r"equal.*False|same.*False|\bnan\b", printed), printed
    assert not [*temporary.iterdir(), *current.iterdir()], "it leaves files behind"
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
