"""DeepSpeed's asserts under `python -O`. Tests of the other workarounds are in `frameworks`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# A fake module in place of DeepSpeed's, so that DeepSpeed need not be installed.
MODULE = """
done = []
def write():
    assert done.append("written") is None
"""
WRITE = """
import sys
import deepnvme.deepspeed
{before}
deepnvme.deepspeed.install()
import deepspeed.io.writer as writer
writer.write()
sys.exit(3 if writer.done == ["written"] else 4)
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed" / "io"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").touch()
    (folder / "writer.py").write_text(MODULE)


@pytest.mark.parametrize("options", [(), ("-O",), ("-OO",)])
def test_io_in_asserts(python: Callable[..., subprocess.CompletedProcess[str]], options: tuple[str, ...]) -> None:
    python(WRITE.format(before=""), status=3, options=options)


def test_too_late(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Other modules may have imported functions without their asserts."""
    before = "import deepspeed.io.writer"
    done = python(WRITE.format(before=before), status=1, options=("-O",))
    assert "RuntimeError: deepspeed.io.writer was imported before deepnvme.deepspeed.install()" in done.stderr
    python(WRITE.format(before=before), status=3)


def test_refused_installation_leaves_nothing(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    program = """
        import sys
        import deepspeed.io.writer
        import deepnvme.deepspeed
        hooks = list(sys.meta_path)
        try:
            deepnvme.deepspeed.install()
        except RuntimeError:
            sys.exit(3 if sys.meta_path == hooks else 4)
    """
    python(program, status=3, options=("-O",))
