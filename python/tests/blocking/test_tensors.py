"""Calls on tensors and models that wait, against all that can come; ``docs/blocking-calls.md`` has the same table."""

from __future__ import annotations

import re
import signal
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import deepnvme

pytest.importorskip("torch")

from . import checkpoints, training
from .checkpoints import CK_ASYNC, CK_CLOSE, CK_SAVE, CK_WAIT, SAVE
from .training import SAVE_STATE
from .zygote import ATTEMPTS, LIMIT_S, SETUP, TOO_SLOW, Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of a thread that Python ends inside a function of torch; one inside ours ends in another way.
ABORTED_BY_TORCH = "terminate called without an active exception"
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "blocking-calls.md"
COLUMNS = ("cancel", "timeout", "close", "Ctrl-C", "fork", "exit")
ROWS = (*checkpoints.ROWS, *training.ROWS)
CELLS = {**checkpoints.CELLS, **training.CELLS}


def table() -> dict[tuple[str, str], str]:
    """Read the document's second table."""
    text = DOCUMENT.read_text().split("\n## Checkpoints")[1]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(rows[0][1:]) == COLUMNS
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(COLUMNS, row[1:], strict=True)}


def test_the_document_and_the_tests_have_one_table() -> None:
    documented = table()
    assert {row for row, _ in documented} == set(ROWS)
    tested = {cell: result for cell, result in documented.items() if not re.match(r"— \w+", result)}
    assert tested == {cell: result for cell, (result, _) in CELLS.items()}


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Have one for all cells."""
    made = Zygote(tmp_path_factory.mktemp("settings"))
    yield made
    made.close()


@pytest.mark.parametrize(("row", "column"), CELLS, ids=lambda name: re.sub(r"[`,=' ]+", "-", name).strip("-"))
def test_a_call_that_waits_ends_in_time(row: str, column: str, tmp_path: Path, zygote: Zygote) -> None:
    result, program = CELLS[row, column]
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        # What goes on would be finished at exit, which is another cell.
        end = "" if column == "exit" else "\nos._exit(0)\n"
        status, _ = zygote.run(folder, SETUP + textwrap.dedent(program) + end)
        said = (folder / "output").read_text()
        late = status == TOO_SLOW
        if column == "exit" and status == -signal.SIGABRT and ABORTED_BY_TORCH in said:
            status = 0
        if column == "exit" and status == 0:
            # Until Python's own end begins: torch takes its time to be unloaded.
            left, over = map(float, [line for line in said.splitlines() if re.fullmatch(r"\d+\.\d+", line)][-2:])
            late = over - left > LIMIT_S
            assert_left(row, folder)
        if not late:
            assert status == 0, f"{result}: status {status}\n{said}"
            return
    pytest.fail(f"{row} against {column} took longer than {LIMIT_S} s, {ATTEMPTS} times")


def assert_left(row: str, folder: Path) -> None:
    """What a process that has ended in the middle of a call leaves behind."""
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"output"}
    if row == SAVE and "file.pt" in there:
        assert len(deepnvme.load(folder / "file.pt", verify="full")["a"]) == 24 << 20
    if row == SAVE_STATE:
        assert "state" not in there
    if row in (CK_SAVE, CK_ASYNC) and (kept := deepnvme.Checkpointer(folder / "run")).checkpoints:
        assert len(kept.restore(verify="full")["a"]) >= 1 << 20
    if row in (CK_WAIT, CK_CLOSE):
        assert {"run/step-00000001.pt", "run/manifest.json"} <= there
