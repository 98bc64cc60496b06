"""Blocking calls during cancel, close, Ctrl-C, fork and exit, as ``docs/explanation/blocking-calls.md`` tabulates."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import deepnvme

from . import (
    checkpoints,
    commands,
    engine,
    frameworks,
    handles,
    joint,
    lookups,
    offloader,
    offloading,
    readers,
    rows,
    swapping,
    training,
    wrappers,
)
from .attempts import Attempts
from .checkpoints import CK_ASYNC, CK_CLOSE, CK_SAVE, CK_WAIT, SAVE
from .commands import CONVERT, PACK
from .engine import FILE_CLOSE, FILE_WRITE
from .fork_server import ForkServer
from .offloading import OFF_SAVE
from .readers import DCP_SAVE
from .results import FIRST
from .training import SAVE_STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

(DOCUMENT,) = (Path(__file__).resolve().parents[3] / "docs").rglob("blocking-calls.md")
COLUMNS = ("cancel", "timeout", "close", "Ctrl-C", "fork", "exit")
MODULES = (
    engine, handles, checkpoints, readers, commands, swapping, rows, lookups, training, offloading, frameworks,
    offloader, joint,
)  # fmt: skip
ROWS = [row for module in MODULES for row in module.ROWS]
CELLS = {cell: tested for module in MODULES for cell, tested in module.CELLS.items()}
PROGRAMS = [(row, column, program) for (row, column), (_, *programs) in CELLS.items() for program in programs]


def tables() -> dict[tuple[str, str], str]:
    """Read the tables of the document."""
    cells: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in DOCUMENT.read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if row[:1] == ["call"]:
            columns = row[1:]
            assert set(columns) <= set(COLUMNS)
        elif row and not row[0].startswith("---"):
            found = {(row[0], column): cell for column, cell in zip(columns, row[1:], strict=True)}
            assert not found.keys() & cells.keys(), "no cell is there twice"
            cells |= found
    return cells


def test_the_document_and_the_tests_have_the_same_tables() -> None:
    documented = tables()
    assert {row for row, _ in documented} == set(ROWS)
    tested = {cell: result for cell, result in documented.items() if not re.match(r"— \w+", result)}
    assert tested == {cell: result for cell, (result, *_) in CELLS.items()}


@pytest.fixture(scope="module")
def fork_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, ForkServer]]:
    """Start one for the programs that need torch, and one for the others."""
    has_torch = importlib.util.find_spec("torch") is not None
    servers = {
        needs_torch: ForkServer(tmp_path_factory.mktemp("settings"), has_torch=needs_torch)
        for needs_torch in {False, has_torch}
    }
    yield servers
    for server in servers.values():
        server.close()


def server_of(servers: dict[bool, ForkServer], *, needs_torch: bool) -> ForkServer:
    if needs_torch not in servers:
        pytest.skip("torch is not installed")
    return servers[needs_torch]


def name_of(part: str) -> str:
    return "" if "\n" in part or "(" in part else re.sub(r"[`,=' ]+", "-", part).strip("-")


@pytest.mark.parametrize(("row", "column", "program"), PROGRAMS, ids=name_of)
def test_a_call_that_waits_ends_in_time(
    row: str, column: str, program: str, tmp_path: Path, fork_servers: dict[bool, ForkServer]
) -> None:
    setup = engine.SETUP if row in (*engine.ROWS, *handles.ROWS) else ""
    needs_torch = row not in engine.ROWS
    attempts = Attempts(server_of(fork_servers, needs_torch=needs_torch), tmp_path, measures_exit=not needs_torch)
    for folder in until_judged(attempts, column, setup + textwrap.dedent(program)):
        if column == "exit":
            assert_left(row, folder)
            assert_sound(row, folder)
            assert_left_by_integration(row, folder)


@pytest.mark.parametrize(("name", "column"), wrappers.PROGRAMS, ids=name_of)
def test_a_call_of_an_integration_ends_like_the_call_that_it_makes(
    name: str, column: str, tmp_path: Path, fork_servers: dict[bool, ForkServer]
) -> None:
    attempts = Attempts(server_of(fork_servers, needs_torch=True), tmp_path, measures_exit=False)
    for folder in until_judged(attempts, column, wrappers.PROGRAMS[name, column]):
        if column == "exit" and name.startswith("save of") and (folder / "file").exists():
            assert len(deepnvme.load(folder / "file", verify="full")["a"]) == 24 << 20


def until_judged(attempts: Attempts, column: str, program: str) -> Iterator[Path]:
    # Otherwise a call that still runs would finish at exit, which is the column for exit.
    end = "" if column == "exit" else "\nos._exit(0)\n"
    return attempts.until_judged(program + end, is_exit=column == "exit")


def assert_left(row: str, folder: Path) -> None:
    """Check the files that a process leaves behind if it ends in the middle of a call."""
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"output"}
    if row in engine.ROWS and CELLS[row, "exit"][0] == FIRST:
        assert (folder / "file").stat().st_size == 8 << 20
    if row in (handles.WAIT, handles.ASYNC):
        assert (folder / "aio").stat().st_size == (8 if row == handles.WAIT else 2) << 20
    if row == FILE_WRITE:
        assert "new" not in there
    if row == FILE_CLOSE and "new" in there:
        assert (folder / "new").stat().st_size == 64 << 20
    if row == SAVE and "file.pt" in there:
        assert len(deepnvme.load(folder / "file.pt", verify="full")["a"]) == 24 << 20
    if row == SAVE_STATE:
        assert "state" not in there
    if row == OFF_SAVE:
        assert not [name for name in there if not name.startswith(".")]
    if row in (CK_SAVE, CK_ASYNC) and (kept := deepnvme.Checkpointer(folder / "run")).checkpoints:
        assert len(kept.restore(verify="full")["a"]) >= 1 << 20
    if row in (CK_WAIT, CK_CLOSE):
        assert {"run/step-00000001.pt", "run/manifest.json"} <= there


def assert_left_by_integration(row: str, folder: Path) -> None:
    """Check the files of a framework or a model server."""
    path = folder / "file"
    if row == frameworks.WAIT or (row == frameworks.SAVE and path.exists()):
        assert len(deepnvme.load(path, verify="full")["a"]) == 1 << 20
    if row in offloader.ROWS:
        assert {path.name for path in folder.iterdir()} == {"output"}


def assert_sound(row: str, folder: Path) -> None:
    """Check that a file or folder that a command or torch would make is whole or absent."""
    if row == CONVERT and (folder / "new.pt").exists():
        assert len(deepnvme.load(folder / "new.pt", verify="full")["a"]) == 24 << 20
    for command, made, index in ((PACK, "new", "new"), (DCP_SAVE, "run", "run/deepnvme.json")):
        if row == command and (folder / index).exists():
            assert deepnvme.verify(folder / made)["is_sound"]
