"""A DeepSpeed engine that saves and loads its checkpoints through deepnvme."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

PROGRAM = """
import sys, torch, deepspeed
from deepnvme.integrations.deepspeed import DeepnvmeCheckpointEngine
import deepspeed.comm.torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # one process needs no op to be compiled
folder = sys.argv[1]
config = {"train_batch_size": 4, "zero_allow_untested_optimizer": True}
def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(30, 40)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    return engine
def train(engine):
    loss = engine(torch.randn(4, 30)).pow(2).sum()
    engine.backward(loss)
    engine.step()
first = make(1)
first.checkpoint_engine = DeepnvmeCheckpointEngine()
train(first)
first.save_checkpoint(folder, tag="one")
for trusted in (True, None):
    other = make(2)
    if trusted:
        other.checkpoint_engine = DeepnvmeCheckpointEngine(trusted=True)
    other.load_checkpoint(folder, tag="one")
    assert torch.equal(other.module.weight, first.module.weight)
    left, right = other.optimizer.state_dict(), first.optimizer.state_dict()
    assert torch.equal(left["state"][0]["exp_avg"], right["state"][0]["exp_avg"])
print("done")
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("done")
    assert list((tmp_path / "one").glob("*model_states.pt"))
