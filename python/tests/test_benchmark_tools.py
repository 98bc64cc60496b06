"""The parts that all benchmarks share."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def common() -> Iterator[Callable[[str], Any]]:
    """Import a module of ``benchmarks/common``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield lambda name: importlib.import_module(f"common.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]


def test_the_scratch_folder_is_new_and_nothing_else_goes(common: Callable[[str], Any], tmp_path: Path) -> None:
    precious = tmp_path / "weights" / "model.safetensors"
    precious.parent.mkdir()
    precious.write_text("x")
    with pytest.raises(KeyError), common("command").scratch_folder(tmp_path, "weights") as folder:
        assert folder.parent == tmp_path
        assert list(folder.iterdir()) == []
        (folder / "file").write_text("y")
        raise KeyError
    assert not folder.exists()
    assert precious.read_text() == "x"


def test_an_engine_that_fails_is_skipped(common: Callable[[str], Any]) -> None:
    fio = common("fio")

    def speed(setting: str) -> float:
        if setting == "io_uring":
            raise fio.FioFailed("not permitted")
        return 2.0 if setting == "libaio" else 1.0

    speeds = fio.measure_settings(["io_uring", "psync", "libaio"], speed)
    assert speeds == {"psync": 1.0, "libaio": 2.0}
    assert fio.fastest(speeds) == "libaio"
    with pytest.raises(fio.FioFailed, match="not permitted"):
        fio.measure_settings(["io_uring"], speed)


def test_garbage_collection_is_as_before(common: Callable[[str], Any]) -> None:
    timed = common("measure").timed
    assert timed(gc.isenabled, 1)[1] is False
    assert gc.isenabled()
    gc.disable()
    try:
        timed(lambda: None, 1)
        assert not gc.isenabled()
    finally:
        gc.enable()


ANSWERS = """
import os
from common.child import serve
from common.not_offered import NotOffered

def answer(request):
    print("of a library", flush=True)
    if request["is"] == "not offered":
        raise NotOffered("no such call")
    if request["is"] == "end":
        os._exit(1)
    return {"twice": 2 * request["is"]}

serve(lambda: answer)
"""


def test_a_child_answers_or_says_why_not(
    common: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.setenv("PYTHONPATH", f"{BENCHMARKS}:{tmp_path}", prepend=":")
    child = common("child").Child("answers", log=tmp_path / "log")
    assert child.ask({"is": 2}) == {"twice": 4}
    with pytest.raises(common("not_offered").NotOffered, match="no such call"):
        child.ask({"is": "not offered"})
    with pytest.raises(RuntimeError, match="TypeError"):
        child.ask({"is": None})
    assert child.ask({"is": "x"}) == {"twice": "xx"}
    with pytest.raises(RuntimeError, match=r"(?s)its process has ended: of a library.*of a library"):
        child.ask({"is": "end"})
    with pytest.raises(RuntimeError, match="its process has ended"):
        child.ask({"is": 2})
    child.close()
