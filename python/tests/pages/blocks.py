"""Run the fenced blocks of a page in order, in one namespace and one folder.

A page controls its blocks by comments, which its readers do not see:

- ``<!-- skip: reason -->`` just before a block: it does not run.
- ``<!-- setup`` and lines of Python up to ``-->``: they run at this place, to prepare blocks or to check their results.
  ``printed()`` is the output so far.
- ``<!-- process: NAME -->`` just before a block: it runs in another process, with all blocks of that name and each
  ``<!-- setup: NAME``. Further words after commas: ``needs X``, a module or a command without which they are skipped;
  ``ranks N``, that many processes with the environment of torchrun; ``ranks N M``, a run with each number;
  ``twice``, in the same folder.

Sizes and folders of pages are those of large machines; ``RESIZED`` says what they become here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forked_python import ForkedPython

SHELL = ("bash", "sh", "console")
LANGUAGES = ("python", "json", "toml", *SHELL)
# The output of a program. `scripts/reference.py --check` compares the help of the commands.
OUTPUT = "text"
SECONDS_MAX = 200
# Commands that do not run here, and the reason.
ELSEWHERE = {
    "pip": "scripts/setup.py installs the wheel into a new environment before the tests run",
    "make": "the tests are themselves started by make, and its help lists each target",
}
RESIZED = (
    (r"/mnt/", "./mnt/"),
    (r"\b(\d+)GB\b", r"\1MB"),
    (r"--size 2G\b", "--size 2M"),
    (r"\bdeepnvme tune\b", "deepnvme tune --budget 1s --size 1M"),
)
PIECE = re.compile(
    r"^<!-- *(?P<word>setup|skip|process)\b:?(?P<header>[^\n]*?)(?P<code>\n.*?)?-->"
    r"|^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)


class PageError(Exception):
    """A page has a marker or a block that this module does not know."""


@dataclass(frozen=True)
class Block:
    """A fenced block, or a set-up (whose language is ``setup``)."""

    place: str
    line: int
    language: str
    text: str
    process: str = ""
    skip: str | None = None


@dataclass
class Page:
    """The blocks of a page."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    # By name of a process.
    needs: dict[str, list[str]] = field(default_factory=dict)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    is_twice: set[str] = field(default_factory=set)

    def processes(self) -> list[str]:
        """Return the names of processes that have something to run; the name of the tests' own is empty."""
        return sorted({block.process for block in self.blocks if block.language != "setup" and block.skip is None})

    def of(self, process: str) -> list[Block]:
        """Return what runs in a process."""
        return [block for block in self.blocks if block.process == process and block.skip is None]


def read_page(path: Path) -> Page:
    """Find the blocks and markers of a page."""
    text, page = path.read_text(), Page(path)
    markers: dict[str, str] = {}
    end = 0
    for piece in PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 1
        place = f"{path.name}:{line}"
        if markers and text[end : piece.start()].strip():
            raise PageError(f"{place}: the marker before it does not stand just before a block")
        end = piece.end()
        if piece["word"] == "setup":
            page.blocks.append(Block(place, line, "setup", piece["code"] or "", piece["header"].strip()))
        elif piece["word"]:
            markers[piece["word"]] = (piece["header"] + (piece["code"] or "")).strip()
            if not markers[piece["word"]]:
                raise PageError(f"{place}: the marker {piece['word']!r} says no more")
        else:
            language = piece["language"].split()[0] if piece["language"].strip() else ""
            skip, process = markers.pop("skip", None), _read_process(page, markers.pop("process", ""), place)
            if language == OUTPUT and skip is None:
                continue
            if skip is None and language not in LANGUAGES:
                raise PageError(f"{place}: a block of {language!r} runs nowhere: say why, <!-- skip: reason -->")
            page.blocks.append(Block(place, line + 1, language, _dedent(piece["text"]), process, skip))
    if markers:
        raise PageError(f"{path.name}: no block follows the last marker")
    return page


def _read_process(page: Page, header: str, place: str) -> str:
    name, *options = [part.strip() for part in header.split(",")]
    for option in options:
        word, _, value = option.partition(" ")
        if word == "needs":
            page.needs.setdefault(name, []).append(value)
        elif word == "ranks":
            page.ranks[name] = [int(number) for number in value.split()]
        elif word == "twice":
            page.is_twice.add(name)
        else:
            raise PageError(f"{place}: the marker of a process says {option!r}")
    return name


def _dedent(text: str) -> str:
    indent = min((len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip()), default=0)
    return "\n".join(line[indent:] for line in text.splitlines()) + "\n"


def commands(block: Block) -> list[str]:
    """Return the lines that a reader would type, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in (re.sub(r"(^| +)#.*", "", line) for line in lines) if line.strip()]


def is_elsewhere(command: str) -> bool:
    """Whether a command is tested in another place."""
    return command.split(maxsplit=1)[0] in ELSEWHERE


class Session:
    """Runs blocks in the current folder. They share their names."""

    def __init__(self) -> None:
        self.output = io.StringIO()
        self.names: dict[str, Any] = {"__name__": "__main__", "printed": self.output.getvalue}

    def run(self, block: Block, path: Path) -> None:
        """Run a block, or parse it if it is data."""
        text = block.text
        if block.language == "json":
            json.loads(text)
        elif block.language == "toml":
            _parse_toml(text)
        elif block.language in SHELL:
            if not commands(block):
                raise PageError(f"{block.place}: there is no command: begin its line with '$ '")
            self._run_shell("\n".join(line for line in commands(block) if not is_elsewhere(line)))
        else:
            # Line numbers of tracebacks are those of the page.
            code = compile("\n" * (block.line - 1) + _resize(text), str(path), "exec")
            with contextlib.redirect_stdout(self.output):
                exec(code, self.names)

    def _run_shell(self, text: str) -> None:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
        command = ["bash", "-euo", "pipefail", "-c", _resize(text)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
        self.output.write(done.stdout)
        assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def _resize(text: str) -> str:
    for pattern, replacement in RESIZED:
        text = re.sub(pattern, replacement, text)
    for folder in re.findall(r"\./mnt/\w+", text):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return text


def _parse_toml(text: str) -> None:
    try:
        import tomllib  # type: ignore[import-not-found,unused-ignore]
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
    tomllib.loads(text)


def run_here(page: Page) -> None:
    """Run a page's blocks in this process, twice: most examples do something else where something is there already."""
    session = Session()
    for block in page.of("") * 2:
        session.run(block, page.path)


def run_process(page: Page, name: str, folder: Path, forked: ForkedPython) -> None:
    """Run blocks in processes of their own, and wait for them. Those of DeepSpeed replace parts of it at its import."""
    script, arguments = Path(__file__), (str(page.path), name)
    for ranks in page.ranks.get(name, [0]) * (2 if name in page.is_twice else 1):
        environments = [*_environments(ranks)]
        if "deepspeed" in page.needs.get(name, []):
            _run_new(script, arguments, folder, environments)
        else:
            _run_forked(script, arguments, folder, environments, forked)


def _run_forked(
    script: Path, arguments: tuple[str, ...], folder: Path, environments: list[dict[str, str]], forked: ForkedPython
) -> None:
    with tempfile.TemporaryDirectory() as outside:
        outputs = [Path(outside, str(rank)) for rank in range(len(environments))]
        processes = [
            forked.start(
                script, *arguments, folder=folder, environment=each, stdout=output, stderr=output, seconds=SECONDS_MAX
            )
            for each, output in zip(environments, outputs, strict=True)
        ]
        statuses = [forked.wait(process).status for process in processes]
        printed = [output.read_text()[-3000:] for output in outputs]
    assert not any(statuses), "\n".join([str(statuses), *printed])


def _run_new(script: Path, arguments: tuple[str, ...], folder: Path, environments: list[dict[str, str]]) -> None:
    command: list[str | Path] = [sys.executable, script, *arguments]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [subprocess.Popen(command, cwd=folder, env=each, **pipes) for each in environments]
    try:
        outputs = [process.communicate(timeout=SECONDS_MAX)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in started), "\n".join(output[-3000:] for output in outputs)


def _environments(ranks: int) -> Iterator[dict[str, str]]:
    """Yield the environment of each process."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    if not ranks:
        yield environment
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    for rank in range(ranks):
        yield environment | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }  # fmt: skip


if __name__ == "__main__":
    page_here = read_page(Path(sys.argv[1]))
    session_here = Session()
    for block_here in page_here.of(sys.argv[2]):
        session_here.run(block_here, page_here.path)
