"""An unchanged config with DeepSpeed's checkpoint writers, without a GPU and without the launcher."""

from __future__ import annotations

import functools
import os
import socket
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'deepspeed>=0.19.8'")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forked_python import ForkedPython

PRELUDE = """
import sys, json, os
from pathlib import Path
import deepnvme, deepnvme.deepspeed
deepnvme.deepspeed.install()
import pytest, torch, deepspeed, deepspeed.comm.torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # so few processes need no op to be compiled
folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])

def make(seed, writer, stage):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 50))
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage}}
    if writer:
        config["checkpoint"] = {"writer": writer}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine

def train(engine):
    inputs = torch.randn(4, 30, generator=torch.Generator().manual_seed(rank)).bfloat16()
    engine.backward(engine(inputs).pow(2).mean())
    engine.step()

def differences(left, right):
    if isinstance(left, torch.Tensor):
        return not torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() != right.keys() or any(differences(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) != len(right) or any(map(differences, left, right))
    return type(left) in (int, float, str, bool) and left != right

def check_same(first, *others):
    for _ in range(2):
        for other in others:
            assert not differences(first.module.state_dict(), other.module.state_dict())
            assert not differences(first.optimizer.state_dict(), other.optimizer.state_dict())
        for engine in (first, *others):
            train(engine)
"""

ONE_PROCESS = """
writers = {
    "fast": {"type": "fast", "io_buffer_size": 1 << 20, "io_buffer_double": True, "show_statistics": True,
             "data_parallel": "replica", "io_multiplier": 2},
    "python": {"type": "python"},
    "decoupled": {"decoupled": True, "show_statistics": True},
}
for name, writer in writers.items():
    for stage in (0, 1, 3):
        tag, before = f"{name}-{stage}", deepnvme.stats().bytes_written
        first = make(1, writer, stage)
        assert type(first.checkpoint_engine).__module__ == "deepnvme.integrations._deepspeed_writers"
        train(first)
        first.save_checkpoint(folder, tag=tag, client_state={"words": ["a", 1]})
        if name == "decoupled":
            # Committed, and named, before the next step of the optimizer; what was saved is what was there.
            expected = {key: value.clone() for key, value in first.module.state_dict().items()}
            train(first)
            other = make(2, writer, stage)
            other.load_checkpoint(folder, tag=tag)
            assert stage == 3 or not differences(other.module.state_dict(), expected)
            first.save_checkpoint(folder, tag=tag)
        stock = make(3, None, stage)
        if name == "decoupled":
            # No step follows: the end of the engine commits.
            (folder / "latest").write_text("older")
            os.link(folder / "latest", folder / f"before-{tag}")
            first.checkpoint_engine.cleanup()
            assert (folder / f"before-{tag}").read_text() == "older", "it is replaced, not written over"
        assert (folder / "latest").read_text() == tag
        files = sorted((folder / tag).glob("*.pt"))
        assert len(files) == (1 if stage == 0 else 2), files
        assert all(path.name.endswith("_states.pt") for path in files)
        assert deepnvme.stats().bytes_written - before >= sum(path.stat().st_size for path in files)
        for path in files:
            torch.load(path, weights_only=False)
        loaded_from, client_state = stock.load_checkpoint(folder)
        assert client_state.get("words", ["a", 1]) == ["a", 1]
        ours = make(2, writer, stage)
        ours.load_checkpoint(folder, tag=tag)
        check_same(first, stock, ours)
mock = make(1, {"type": "mock", "show_statistics": True}, 1)
mock.save_checkpoint(folder, tag="mock")
assert [path.stat().st_size for path in (folder / "mock").glob("*.pt")] == [0, 0]

# A checkpoint of which a file cannot be saved is never committed, and `latest` goes on naming the one before.
first = make(1, {"decoupled": True}, 1)
first.save_checkpoint(folder, tag="whole")
train(first)
assert (folder / "latest").read_text() == "whole"
saver = first.checkpoint_engine
def fail(state_dict, path, save=saver.save):
    save({"no file has this": lambda: 1} if "optim" in path else state_dict, path)
saver.save = fail
with pytest.raises(Exception, match="lambda|[Pp]ickle"):
    first.save_checkpoint(folder, tag="lacking")
del saver.save
assert saver.get_commit_info() is None
with pytest.raises(RuntimeError, match="not committed"):
    saver.commit(None)
train(first)
assert (folder / "latest").read_text() == "whole"
saver.cleanup()
assert (folder / "latest").read_text() == "whole"

# A file in the format of before torch 1.6 is a pickle from end to end: it is refused, and the message says what to do.
torch.save({"a": torch.ones(3)}, folder / "old.pt", _use_new_zipfile_serialization=False)
with pytest.raises(deepnvme.errors.UnsupportedError, match="torch.load"):
    first.checkpoint_engine.load(folder / "old.pt")

# Nor is one of which a file could not be saved, if the error is raised by a load.
from types import SimpleNamespace
(folder / "lost" / "file").mkdir(parents=True)
saver.create(SimpleNamespace(tag="lost", save_latest=True, save_dir=folder))
saver.save({"a": torch.ones(1 << 20)}, folder / "lost" / "file")
with pytest.raises(OSError, match="lost/file"):
    saver.load(folder / "whole" / "mp_rank_00_model_states.pt")
with pytest.raises(RuntimeError, match="not committed"):
    saver.commit(None)
saver.cleanup()
assert (folder / "latest").read_text() == "whole"

# An error in the background is raised before the next step of the optimizer.
failing = make(1, {"decoupled": True}, 0)
(folder / "taken" / "mp_rank_00_model_states.pt").mkdir(parents=True)
train(failing)
failing.save_checkpoint(folder, tag="taken")
with pytest.raises(OSError, match="mp_rank_00_model_states.pt"):
    train(failing)

deepnvme.deepspeed.uninstall()
import deepspeed.runtime.checkpoint_engine.utils as utils
import deepspeed.runtime.checkpoint_engine as package
assert utils.FastCheckpointEngine is package.FastCheckpointEngine
assert utils.create_data_parallel_writer_config.__module__ == "deepspeed.runtime.model_checkpointing.utils"
print("done")
"""

TWO_PROCESSES = """
for writer in ({"type": "fast", "data_parallel": "replica"}, {"decoupled": True}):
    for stage in (1, 3):
        tag = f"{len(writer)}-{stage}"
        first = make(1, writer, stage)
        train(first)
        first.save_checkpoint(folder, tag=tag)
        first.checkpoint_engine.cleanup()
        torch.distributed.barrier()
        names = sorted(path.name for path in (folder / tag).iterdir() if path.suffix == ".pt")
        assert len(names) == (3 if stage == 1 else 4), names
        for config in (None, writer):
            other = make(2, config, stage)
            other.load_checkpoint(folder, tag=tag)
            assert not differences(first.optimizer.state_dict(), other.optimizer.state_dict())
torch.distributed.barrier()
print("done", flush=True)
# A thread of gloo may give back its last tensor when the interpreter has gone, and torch 2.15 aborts then.
os._exit(0)
"""


@pytest.fixture
def run(forked: ForkedPython, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path, int], list[str]]:
    """Return a function that runs a program on some ranks, in forks of a process without DeepSpeed."""
    return functools.partial(run_forked, forked, tmp_path_factory.mktemp("ranks"))


def run_forked(forked: ForkedPython, files: Path, program: str, folder: Path, world_size: int) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CROSS_")} | common
    script = files / "script.py"
    script.write_text(PRELUDE + program)
    processes = [
        forked.start(
            script,
            str(folder),
            folder=files,
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=files / f"stdout-{rank}",
            stderr=files / f"stderr-{rank}",
            seconds=300,
        )
        for rank in range(world_size)
    ]
    statuses = [forked.wait(process).status for process in processes]
    outs = [(files / f"stdout-{rank}").read_text() for rank in range(world_size)]
    for rank, status in enumerate(statuses):
        assert status == 0, outs[rank][-1000:] + (files / f"stderr-{rank}").read_text()[-4000:]
    return outs


# Names of private files during a write, current and former.
FOREIGN = [f".{name}.deepnvme-tmp-{end}" for name in ("latest", "mp_rank_00_model_states.pt")
           for end in ("1-0", "1f-0-0123456789abcdef", f"new-{'0' * 32}")]  # fmt: skip


def test_every_writer(tmp_path: Path, run: Callable[[str, Path, int], list[str]]) -> None:
    for name in FOREIGN:
        for folder in (tmp_path, tmp_path / "fast-0", tmp_path / "decoupled-0"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("foreign")
    (out,) = run(ONE_PROCESS, tmp_path, 1)
    for name in FOREIGN:
        for folder in (tmp_path, tmp_path / "fast-0", tmp_path / "decoupled-0"):
            assert (folder / name).read_text() == "foreign"
    assert out.rstrip().endswith("done")
    reported = [line for line in out.splitlines() if line.startswith("stats = ")]
    assert len(reported) == 5 + 5 * 2 + 2
    assert all("'writer': 'deepnvme'" in line and "write_GB/s" in line for line in reported)


def test_two_processes(tmp_path: Path, run: Callable[[str, Path, int], list[str]]) -> None:
    assert all(out.rstrip().endswith("done") for out in run(TWO_PROCESSES, tmp_path, 2))
