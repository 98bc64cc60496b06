"""Processes without working standard streams: no save fails, and no output lands in a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deepnvme

# Nothing can be printed, so the exit status reports the failure.
ROUND = """
import os, sys, torch, deepnvme
state = {"a": torch.arange(50_000.0) + 1}
deepnvme.save(state, "a.pt", progress=SHOWN)
deepnvme.save(state, "a.safetensors", max_shard_bytes=100_000)
assert torch.equal(deepnvme.load("a.pt", progress=SHOWN, verify="full")["a"], state["a"])
for is_async in (False, True):
    with deepnvme.Checkpointer("run", async_=is_async) as checkpointer:
        checkpointer.save(1, state)
    assert torch.equal(checkpointer.restore()["a"], state["a"])
os._exit(0)
"""
# Output of a library must not land in a file that got the descriptor of a closed stream.
NOISE = """
import os, torch, deepnvme
state = {"a": torch.arange(50_000.0) + 1}
for number in (0, 1, 2):
    try:
        os.close(number)
    except OSError:
        pass
engine = deepnvme.Engine(backend="threads")
def noise():
    for number in (0, 1, 2):
        try:
            os.write(number, b"a warning")
        except OSError:
            pass
with deepnvme.open("a.bin", "wb") as file:
    noise()
    file.write(state["a"].numpy().tobytes())
    noise()
swapper = deepnvme.Swapper(".", memory="1MiB")
noise()
swapper.put("a", state["a"])
noise()
assert torch.equal(swapper.read("a", 0, torch.empty(50_000)), state["a"])
assert open("a.bin", "rb").read() == state["a"].numpy().tobytes()
os._exit(0)
"""


@pytest.mark.parametrize("shown", [None, True])
@pytest.mark.parametrize("stream", ["None", "closed", "full", "no file"])
def test_progress_without_a_working_stderr(
    tmp_path: Path, python_fork: Callable[..., object], stream: str, shown: bool | None
) -> None:
    begin = {
        "None": "import sys; sys.stderr = sys.stdout = None\n",
        "closed": "import sys; sys.stderr.close()\n",
        "full": "import sys; sys.stderr = open('/dev/full', 'w')\n",
        "no file": "",
    }[stream]
    program = begin + ROUND.replace("SHOWN", repr(shown))
    if stream == "no file":
        # An interpreter that starts without them has none.
        command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
        assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    else:
        python_fork(program)
    assert torch.equal(deepnvme.load(tmp_path / "a.pt")["a"], torch.arange(50_000.0) + 1)


def test_printed_text_lands_in_no_file(python_fork: Callable[..., object]) -> None:
    python_fork(NOISE)
