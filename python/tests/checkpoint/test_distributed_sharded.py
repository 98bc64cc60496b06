"""Sharded states: saved by some processes, loaded by another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepnvme
from ranks import run

pytestmark = pytest.mark.filterwarnings("ignore")

# A whole model, and the same model in shards.
MODEL = """
import warnings
warnings.simplefilter("ignore")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
mesh = init_device_mesh("cpu", (world,))
def whole(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(37, 50), torch.nn.ReLU(), torch.nn.Linear(50, 11, bias=False))
    return model, torch.optim.AdamW(model.parameters())
def step(model, optimizer, x):
    model(x).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
def sharded(seed):
    model, _ = whole(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())
def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": 7, "rank": rank}
x = torch.ones(3, 37)
model, optimizer = sharded(1)
step(model, optimizer, x)
"""
SAVE = (
    MODEL
    + """
with Checkpointer(folder, keep=2, async_=async_) as checkpointer:
    with checkpointer.overlap(optimizer) if overlap else checkpointer:
        for number in (1, 2, 7):
            checkpointer.save(number, state_of(model, optimizer))
            if number == 7:
                full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
            step(model, optimizer, x)
        checkpointer.wait()
        answer = [c.path.name for c in checkpointer.checkpoints], checkpointer.stats().nbytes
if rank == 0:
    torch.save(full, folder.parent / "full.pt")
"""
)
LOAD = (
    MODEL
    + """
full = torch.load(folder.parent / "full.pt")
with Checkpointer(folder) as checkpointer:
    try:
        checkpointer.restore()
    except ValueError as error:
        answer = str(error)
    other, others = sharded(2)
    step(other, others, x)
    into = state_of(other, others)
    try:
        checkpointer.restore(into={"model": {"0.wieght": torch.zeros(50, 37)}})
    except KeyError as error:
        assert "step-00000007: no entry is named 'model.0.wieght'; its entries are: " in str(error), error
    else:
        raise AssertionError("a wrong name is accepted")
    assert checkpointer.restore(into=into, step=7) is into
    assert into["step"] == 7
    set_state_dict(other, others, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    same({name: tensor.full_tensor() for name, tensor in other.state_dict().items()}, full)
    # One step further, both are the same still: so were the moments.
    for number in range(3):
        step(model, optimizer, x) if number < 2 else None
    step(model, optimizer, x)
    step(other, others, x)
    for left, right in zip(model.parameters(), other.parameters()):
        assert torch.allclose(left.full_tensor(), right.full_tensor(), atol=1e-6), (left, right)
"""
)


@pytest.mark.parametrize(("async_", "overlap"), [(False, False), (True, False), (False, True)])
def test_another_number_of_processes_loads_it(tmp_path: Path, async_: bool, overlap: bool) -> None:
    folder = tmp_path / "c"
    answers = run(SAVE, 2, folder, async_=async_, overlap=overlap)
    assert answers[0] == answers[1]
    assert answers[0][0] == ["step-00000002", "step-00000007"]
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "step-00000002", "step-00000007"}
    for world in (1, 4) if not async_ and not overlap else (3,):
        answers = run(LOAD, world, folder)
        assert all("restore(into=state)" in answer for answer in answers), answers


def test_a_process_alone_without_a_group(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run(SAVE, 2, folder, async_=False, overlap=False)
    full = torch.load(tmp_path / "full.pt")
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in full.items()}, "step": 0}
    checkpointer = deepnvme.Checkpointer(folder)
    checkpointer.restore(into=into, verify="full")
    assert into["step"] == 7
    assert all(torch.equal(into["model"][name], full[name]) for name in full)  # type: ignore[index]
    with pytest.raises(
        KeyError, match=r"step-00000007: no entry is named 'model\.0\.wieght'; its entries are: 'model\.0\.bias'"
    ):
        checkpointer.restore(into={"model": {"0.wieght": torch.zeros(50, 37)}})
    with pytest.raises(ValueError, match="only other options"):
        checkpointer.restore(into=into, device="cpu")
    checkpointer.save(8, {"step": 8})
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [2, 7, 8]
    checkpointer.close()
    with deepnvme.Checkpointer(folder, keep=1) as checkpointer:
        assert checkpointer.save(9, {"step": 9})
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "step-00000009.pt"}


FAIL = (
    MODEL
    + """
checkpointer = Checkpointer(folder)
checkpointer.save(1, state_of(model, optimizer))
from deepnvme.integrations.dcp import DeepnvmeWriter
work = DeepnvmeWriter.write_data
def fail(*arguments):
    if rank == 1:
        exec(how)
    return work(*arguments)
DeepnvmeWriter.write_data = fail
try:
    checkpointer.save(2, state_of(model, optimizer))
except Exception as error:
    answer = f"{type(error).__name__}: {error}"
assert [c.step for c in checkpointer.checkpoints] == [1]
DeepnvmeWriter.write_data = work
if how.startswith("raise"):
    assert rank or [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".deepnvme-lock"]
    checkpointer.save(3, state_of(model, optimizer))
    checkpointer.close()
"""
)


def test_a_process_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    answers = run(FAIL, 2, folder, how="raise OSError('the disk is gone')")
    assert answers[1] == "OSError: the disk is gone"
    assert answers[0].startswith("Error: rank 1") or answers[0].startswith("PeerError: rank 1"), answers
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "step-00000001", "step-00000003"}


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    answers = run(FAIL, 2, folder, how="os.kill(os.getpid(), signal.SIGKILL)")
    assert answers[0].startswith("PeerError: another process ended"), answers
    other = folder / ".step-00000009.deepnvme-tmp-1-0"
    other.mkdir()
    (other / "shard").write_text("somebody else's")
    with deepnvme.Checkpointer(folder) as checkpointer:
        checkpointer.save(5, {"step": 5})
    there = {"manifest.json", "step-00000001", "step-00000005.pt", other.name}
    assert {path.name for path in folder.iterdir()} == there
    assert (other / "shard").exists()


MIXED = (
    MODEL
    + """
with Checkpointer(folder) as checkpointer:
    try:
        checkpointer.save(1, state_of(model, optimizer) if rank else {"a": torch.ones(3)})
    except ValueError as error:
        answer = str(error)
"""
)


def test_sharded_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    answers = run(MIXED, 2, tmp_path / "c")
    assert answers[0] == answers[1]
    assert "DTensors on some ranks" in answers[0]


DIFFERENT = """
import warnings
warnings.simplefilter("ignore")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from deepnvme.integrations.dcp import DeepnvmeWriter
import torch.distributed.checkpoint as dcp
mesh = init_device_mesh("cpu", (world,))
def state_of(other):
    local = torch.full((4, 3), float(rank))
    state = {"d": DTensor.from_local(local, mesh, [Shard(0)], run_check=False), "big": torch.ones(100_000)}
    state |= {"random": torch.full((5,), float(rank)), "loss": float(rank), "name": f"rank {rank}"}
    if rank and other:
        exec(other)
    return state
with Checkpointer(folder, keep=1) as checkpointer:
    checkpointer.save(1, state_of(None))
    answer = []
    for other in others:
        try:
            checkpointer.save(2, state_of(other))
            answer.append("saved")
        except Exception as error:
            answer.append(f"{type(error).__name__}: {error}")
    into = state_of(None) if not rank else state_of("state['random'] += 7; state['name'] = 'x'")
    checkpointer.restore(into=into, verify="full")
    answer.append((into["random"].tolist(), into["loss"], into["name"], into["d"].to_local().sum().item()))
try:
    dcp.save(state_of(dtype), storage_writer=DeepnvmeWriter(folder / "dcp"))
    answer.append("saved")
except BaseException as error:
    answer.append(str(error))
"""
OTHERS = {
    "state['d'] = DTensor.from_local(torch.ones(4, 3).bfloat16(), mesh, [Shard(0)], run_check=False)": "d: its dtype",
    "state['random'] = state['random'].double()": "random: its dtype is torch.float64 at rank 1",
    "state['random'] = torch.ones(7)": r"random: its size is (7,) at rank 1",
    "state['random'] = 5": "random: its kind is an object at rank 1",
    "state['big'] = torch.ones(100_001)": "big: its size",
    "state['random', 1] = 5": "('random', 1) is a key of the state",
    "state['random'] = torch.eye(3).to_sparse()": "save tensor.to_dense()",
}


def test_states_that_differ_between_ranks(tmp_path: Path) -> None:
    answers = run(DIFFERENT, 3, tmp_path / "c", others=[*OTHERS], dtype=next(iter(OTHERS)))
    for answer in answers:
        *refused, restored, dcp = answer
        for error, expected in zip(refused, OTHERS.values(), strict=True):
            assert error.startswith(("InvalidArgumentError: ", "PeerError: ")), answers
            assert expected in error, answers
        assert "d: its dtype" in dcp
        # Small entries may differ between ranks. Those of rank 0 are saved.
        assert list(restored[:3]) == [[0.0] * 5, 0.0, "rank 0"]
    assert [answer[-2][3] for answer in answers] == [0.0, 12.0, 24.0]
    assert {path.name for path in (tmp_path / "c").iterdir()} >= {"manifest.json", "step-00000001"}
