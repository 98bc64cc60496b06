"""Fixtures of the tests inside model servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A package that no registry offers as a wheel.
STUBS = Path(__file__).with_name("stubs")
assert STUBS.is_dir(), STUBS
# A server starts slowly on a busy machine.
LIMIT_S = 600


def settings() -> dict[str, str]:
    """Return environment variables for servers without network or GPU."""
    return {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., Any]:
    """Run a program with a model server in it, without network or GPU. Returns the argument of its ``answer`` call."""

    def run(program: str, **environment: str) -> Any:
        script, answer = tmp_path / "program.py", tmp_path / "answer.json"
        head = f"import json, sys\nanswer = lambda found: open({str(answer)!r}, 'w').write(json.dumps(found))\n"
        script.write_text(head + textwrap.dedent(program))
        answer.unlink(missing_ok=True)
        ended = subprocess.run(
            [sys.executable, script],
            cwd=tmp_path,
            env={**os.environ, **settings(), **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert answer.exists(), f"status {ended.returncode}\n{ended.stdout[-9000:]}\n{ended.stderr[-9000:]}"
        return json.loads(answer.read_text())

    return run
