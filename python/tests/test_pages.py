"""The examples in the pages run, in the order in which they stand there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepnvme

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What sets up the whole process for itself runs in one of its own: below, and in the tests of hosts.
ELSEWHERE = ("deepspeed.initialize", "init_process_group", "integrations.lightning", "integrations.transformers")
# The first code of the second column.
ROWS = re.compile(r"^\| [^|]+ \| `(deepnvme\.[^`]+)`", re.MULTILINE)


def blocks(page: str) -> list[str]:
    return BLOCKS.findall((ROOT / page).read_text())


def training() -> dict[str, Any]:
    """What the pages take for granted."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model, "optimizer": optimizer, "steps": 101, "batches": [torch.randn(2, 4) for _ in range(3)],
        "loss": lambda outputs: outputs.pow(2).sum(), "deepnvme": deepnvme, "torch": torch,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/quick-start.md", "docs/how-to/checkpoints.md"])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = training()
    # Then once more: most examples are different where something is there already.
    for block in blocks(page) * 2:
        if not any(words in block for words in ELSEWHERE):
            exec(compile(block, page, "exec"), names)
    if "checkpointer" in names:
        saved = names["checkpointer"].restore(100, verify="full")
        assert saved.keys() == names["state"].keys()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_what_replaces_other_calls_runs(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 2)
    deepnvme.save(model.state_dict(), "model.safetensors")
    names = {"path": tmp_path / f"x.{suffix}", "folder": tmp_path, "obj": model.state_dict(), "name": "weight",
             "tensors": model.state_dict(), "model": model, "deepnvme": deepnvme}  # fmt: skip
    calls = ROWS.findall((ROOT / "docs/how-to/checkpoints.md").read_text())
    assert len(calls) > 10
    for call in calls:
        eval(call.replace('"cuda"', '"meta"'), names)


def test_the_example_of_deepspeed_runs(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    example = "\n".join(block for block in blocks("docs/how-to/frameworks.md") if "deepspeed.initialize" in block)
    before = (
        "import sys, torch, deepspeed, deepspeed.comm.torch\n"
        "sys.modules['deepspeed.comm.torch'].build_shm_op = lambda: None  # one process needs no op to be compiled\n"
        "model = torch.nn.Linear(4, 2)\n"
        "config = {'train_batch_size': 4, 'optimizer': {'type': 'AdamW', 'params': {'torch_adam': True}}}\n"
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-c", before + example]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for tag in ("step_100", "step_200"):
        assert list((tmp_path / "checkpoints" / tag).glob("*model_states.pt"))
