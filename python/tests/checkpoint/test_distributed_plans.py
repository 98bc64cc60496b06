"""Plans for real models, and the example of the documentation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_smallest_models_bytes_are_shared_out_evenly(tmp_path: Path) -> None:
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "partition",
        "--models",
        "gpt2",
        "--writers",
        "4,1024",
        "--results",
        tmp_path,
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=ROOT / "benchmarks", env=environment, check=True, capture_output=True)
    (record,) = tmp_path.glob("*-partition.json")
    rows = json.loads(record.read_text())["rows"]
    assert rows[0]["writers"] == 4
    assert 64 < rows[1]["writers"] < 1024, "a share has 16 MiB at least"
    for row in rows:
        assert row["is_even"]
        assert row["file_bytes"] > row["parameters"] * 14
