"""The standard output of the commands: where it takes nothing they say so and end with 1, as those of coreutils do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepnvme

torch = pytest.importorskip("torch")

# The wheel's command; and what Python itself says, as `generate` and `stream-bench` do.
SAYS = "import sys; from deepnvme._stream import commands\ncommands._generate = lambda _: commands.say('x' * 9)\n"
RUNS = f"{SAYS}sys.exit(commands.run('generate', '{{}}') or 0)"
COMMANDS: dict[str, list[str]] = {
    "verify": ["verify", "a.pt"],
    "verify --json": ["verify", "--json", "a.pt"],
    "inspect": ["inspect", "a.pt"],
    "convert": ["convert", "a.pt", "b.safetensors"],
    "pack": ["pack", "folder", "packed"],
    "report": ["report", "."],
    "bench": ["bench", "write", ".", "--size", "1M", "--loops", "1", "--warm-up", "0"],
    "help": ["--help"],
    "help of a command": ["pack", "--help"],
    "version": ["--version"],
    "completions": ["completions", "bash"],
    "man": ["man"],
    "generate --help": ["generate", "--help"],
    "generate": [],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    deepnvme.save({"a": torch.ones(5)}, tmp_path / "a.pt")
    (tmp_path / "folder").mkdir()
    deepnvme.save({"a": torch.ones(5)}, tmp_path / "folder" / "model.safetensors")
    return tmp_path


def line(name: str) -> list[str]:
    return [sys.executable, *(["-m", "deepnvme", *COMMANDS[name]] if name != "generate" else ["-c", RUNS])]


def run(name: str, folder: Path, redirection: str) -> tuple[int, str]:
    arguments: Any = ["sh", "-c", f'"$@" {redirection}', "sh", *line(name)]
    done = subprocess.run(arguments, cwd=folder, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("redirection", "why"), [(">&-", "Bad file descriptor"), (">/dev/full", "No space left")])
def test_output_that_goes_nowhere_is_an_error(folder: Path, name: str, redirection: str, why: str) -> None:
    status, said = run(name, folder, redirection)
    assert (status, said.splitlines()[-1][:42]) == (1, "deepnvme: cannot write to standard output:"), said
    assert why in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone_is_none(folder: Path, name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(line(name), cwd=folder, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 0, done.stderr
    assert "standard output" not in done.stderr


def test_no_file_gets_the_number_of_a_closed_stream(folder: Path) -> None:
    """Else a command would write its answer, or its errors, into a file that it has open."""
    before = (folder / "a.pt").read_bytes()
    for redirection in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
        (folder / "b.safetensors").unlink(missing_ok=True)
        status, _ = run("convert", folder, redirection)
        assert status == int(">&-" in redirection.replace("2>&-", "")), redirection
        assert torch.equal(deepnvme.load(folder / "b.safetensors", verify="full")["a"], torch.ones(5))
    assert (folder / "a.pt").read_bytes() == before
