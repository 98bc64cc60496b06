"""A script in a fork has what a new interpreter gives it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forked_python import ForkedPython

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = """
import atexit, json, os, pickle, sys, tempfile
class Own: pass
assert type(pickle.loads(pickle.dumps(Own()))) is Own
assert sys.stdin.read() == ""
atexit.register(lambda: print("at exit"))
names = sorted(name for name in globals() if not name.startswith("__"))
print(json.dumps([__name__, sys.argv[1:], os.getcwd(), dict(os.environ), tempfile.gettempdir(), names]))
print("said", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


LAST = """
import atexit
class Last:
    def __del__(self):
        print("gone")
last = Last()
atexit.register(lambda: print("exit"))
"""


@pytest.fixture
def forked() -> Iterator[ForkedPython]:
    made = ForkedPython("json", "tempfile", "absent.module")
    yield made
    made.close()


def test_each_script_has_a_process_of_its_own(tmp_path: Path, forked: ForkedPython) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    started = [
        forked.start(
            script, str(status), "x y", folder=folder, environment={"TMPDIR": str(folder)},
            stdout=folder / "stdout", stderr=folder / "stderr", seconds=60,
        )
        for status, folder in enumerate(folders)
    ]  # fmt: skip
    assert len({os.getpid(), *started}) == 3
    for status, (process, folder) in enumerate(zip(started, folders, strict=True)):
        assert forked.wait(process).status == status
        place = str(folder)
        names = ["Own", "atexit", "json", "os", "pickle", "sys", "tempfile"]
        said = ["__main__", [str(status), "x y"], place, {"TMPDIR": place}, place, names]
        line, last = (folder / "stdout").read_text().splitlines()
        assert json.loads(line) == said
        assert last == "at exit"
        assert (folder / "stderr").read_text() == "said\n"


def test_an_error_and_a_script_that_hangs(tmp_path: Path, forked: ForkedPython) -> None:
    script, output = tmp_path / "script.py", tmp_path / "output"
    for text, wanted in (("raise ValueError('this')", 1), ("import time; time.sleep(100)", -signal.SIGALRM)):
        script.write_text(text)
        process = forked.start(
            script, folder=tmp_path, environment=dict(os.environ), stdout=output, stderr=output, seconds=2
        )
        status, cpu_s, _ = forked.wait(process)
        assert status == wanted
        assert cpu_s < 60
    assert "ValueError: this" in output.read_text()


def test_code_that_writes_into_a_pipe(tmp_path: Path, forked: ForkedPython) -> None:
    reading, writing = os.pipe()
    process = forked.start(
        "import sys, time; print(sys.argv, flush=True); time.sleep(100)", "x",
        folder=tmp_path, environment=dict(os.environ), stdout=writing, stderr=tmp_path / "stderr", seconds=60,
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading) as stdout:
        assert stdout.readline() == "['-c', 'x']\n"
        assert forked.is_running(process)
        os.kill(process, signal.SIGKILL)
        assert stdout.read() == ""
    while forked.is_running(process):
        pass
    assert forked.wait(process).status == -signal.SIGKILL


def test_a_script_that_ends_fully(tmp_path: Path, forked: ForkedPython) -> None:
    output = tmp_path / "output"
    # Modules are taken apart after the handlers have run.
    for ends_fully, said in ((True, "exit\ngone\n"), (False, "exit\n")):
        output.unlink(missing_ok=True)
        process = forked.start(
            LAST, folder=tmp_path, environment=dict(os.environ), stdout=output, stderr=output, seconds=60,
            ends_fully=ends_fully,
        )  # fmt: skip
        assert forked.wait(process).status == 0
        assert output.read_text() == said
