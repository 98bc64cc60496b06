"""A hanging test ends, and its name is reported."""

import subprocess
import sys
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "python" / "tests" / "shared"

CONFTEST = f"""
import sys
sys.path.insert(0, {str(SHARED)!r})
import hang_watch
hang_watch.CHILDREN_S, hang_watch.SELF_S = {{children_s}}, {{self_s}}
hang_watch.Watch.__init__.__defaults__ = (hang_watch.CHILDREN_S, hang_watch.SELF_S)
from hang_watch import pytest_configure, pytest_runtest_protocol, pytest_unconfigure
"""


def run(folder: Path, test: str, children_s: float, self_s: float) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(children_s=children_s, self_s=self_s))
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_a_grandchild_that_holds_the_output_open_is_killed(tmp_path: Path) -> None:
    test = """
import os, subprocess, sys, time
def test_hangs():
    program = "import os, time; os.fork() or time.sleep(600); time.sleep(600)"
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
def test_goes_on():
    pass
"""
    ended = run(tmp_path, test, 1, 60)
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "test_it.py::test_hangs has taken" in ended.stderr


def test_a_test_that_hangs_itself_ends_the_run_with_stacks(tmp_path: Path) -> None:
    test = """
import threading
def test_hangs():
    threading.Lock().acquire() and threading.Event().wait()
"""
    ended = run(tmp_path, test, 0.5, 4)
    assert ended.returncode != 0
    assert "test_it.py::test_hangs has taken" in ended.stderr
    assert "in test_hangs" in ended.stderr
