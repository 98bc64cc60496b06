"""The examples of `docs/how-to/deepspeed-migration.md` run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'deepspeed>=0.19.8'")

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "deepspeed-migration.md"


def test_examples(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={"PATH": "/nonexistent", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no such file" in done.stdout
    assert (tmp_path / "weights.bin").stat().st_size == 1_000_003
