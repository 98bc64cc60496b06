"""Optimizers of FSDP2, tensor parallelism and DDP: state and gradients of a shard are on the disk of its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ranks import run

if TYPE_CHECKING:
    from pathlib import Path

# Models split in several ways. Each rank has batches of its own, unless the model is split by tensor parallelism alone.
MODELS = """
import copy, warnings
warnings.simplefilter("ignore")
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(33), nn.Linear(33, 64), nn.Linear(64, 33)
    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))

def shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

def by_tensor(model, mesh, sequence=False):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model

line = init_device_mesh("cpu", (world,))
if world == 4:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

def made(how):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if how == "fsdp":
        return shard(model, line)
    if how == "hsdp":
        return shard(model, square)
    if how == "tensor":
        return by_tensor(model, line)
    if how == "sequence":
        return by_tensor(model, line, sequence=True)
    if how == "both":
        return shard(by_tensor(model, square["tensor"]), square["data"])
    if how.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=how == "ddp, views")
    return model

def train(how, model, optimizer, steps, accumulate=1, clip=None, scaler=None):
    for step in steps:
        for micro in range(accumulate):
            batch = {"tensor": 0, "both": rank // 2}.get(how, rank)
            torch.manual_seed(1000 * step + 100 * micro + batch)
            loss = model(torch.randn(3, 4, 33)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

def numbers(model, optimizer):
    state = optimizer.state_dict()["state"]
    kept = [state[index][name] for index in sorted(state) for name in ("exp_avg", "exp_avg_sq")]
    for one, param in zip(kept[::2], model.parameters(), strict=True):
        assert type(one) is type(param.data) and one.shape == param.shape, (type(one), type(param.data))
    return [whole(one).detach() for one in (*model.parameters(), *kept)]

def largest_difference(some, others):
    assert len(some) == len(others)
    return max((one - other).abs().max().item() for one, other in zip(some, others, strict=True))

disk = {"swap_dir": folder / f"swap-{rank}", "memory": "256KB"}
"""

HOW = {"fsdp": 2, "tensor": 2, "sequence": 2, "ddp": 2, "ddp, views": 2, "hsdp": 4, "both": 4}


@pytest.mark.parametrize("how", HOW)
def test_the_same_bits_as_torch(how: str, tmp_path: Path) -> None:
    code = """
answer = {}
for accumulate in (1, 2):
    model = made(how)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(how, model, theirs, range(3), accumulate)
    expected = numbers(model, theirs)
    stores = {"memory": {}, "disk": disk, "gradients too": {**disk, "swap_gradients": True}}
    for name, settings in stores.items():
        model = made(how)
        optimizer = deepnvme.optim.AdamW(model.parameters(), lr=1e-2, **settings)
        train(how, model, optimizer, range(3), accumulate)
        answer[f"{name} {accumulate}"] = largest_difference(numbers(model, optimizer), expected)
        optimizer.close()
"""
    for answer in run(MODELS + code, HOW[how], tmp_path, how=how):
        if how == "sequence":
            # Sums over ranks are added up, where autograd adds first, and sums over ranks at the end.
            assert answer.pop("gradients too 2") < 1e-7
        assert set(answer.values()) == {0.0}, answer


@pytest.mark.parametrize("how", ["fsdp", "sequence", "both"])
def test_the_norm_is_that_of_all_shards(how: str, tmp_path: Path) -> None:
    """Clipping by ``max_norm`` needs no gradient in memory, and works where torch's mixes meshes."""
    code = """
model = made(how)
reference = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
train(how, model, type("Nothing", (), {"step": lambda _: None, "zero_grad": lambda _: None})(), range(1))
squares = sum(whole(param.grad).double().square().sum() for param in model.parameters())
factor = 0.01 / (squares.sqrt().item() + 1e-6)
assert factor < 0.5
for param in model.parameters():
    param.grad *= factor
reference.step()
expected = [whole(param).detach() for param in model.parameters()]
answer = []
for settings in ({}, disk, {**disk, "swap_gradients": True}):
    model = made(how)
    optimizer = deepnvme.optim.SGD(model.parameters(), lr=1e-2, max_norm=0.01, **settings)
    train(how, model, optimizer, range(1))
    answer.append(largest_difference([whole(param).detach() for param in model.parameters()], expected))
    optimizer.close()
"""
    for answer in run(MODELS + code, HOW[how], tmp_path, how=how):
        assert max(answer) < 1e-8, answer


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_gradients_on_disk_can_be_clipped_and_scaled(how: str, tmp_path: Path) -> None:
    code = """
def result(settings, kind):
    model = made(how)
    optimizer = kind(model.parameters(), lr=1e-2, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(how, model, optimizer, range(2), scaler=scaler)
    train(how, model, optimizer, range(2, 4), accumulate=2, clip=0.1)
    # One rank overflows, and all skip the step.
    with torch.no_grad():
        before = [whole(param).clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = None
    batch = torch.randn(3, 4, 33)
    if rank == 1:
        batch[0, 0, 0] = float("inf")
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        assert all(torch.equal(whole(param), one) for param, one in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0**9
    return [whole(param).detach() for param in model.parameters()]
swapped = result({**disk, "swap_gradients": True}, deepnvme.optim.AdamW)
answer = largest_difference(swapped, result({}, torch.optim.AdamW))
"""
    for answer in run(MODELS + code, HOW[how], tmp_path, how=how):
        assert isinstance(answer, float), answer
        assert answer < 1e-5


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_resume_at_another_world_size(moments: str, tmp_path: Path) -> None:
    """Through files of ``save_state``, and as a checkpoint of DTensors."""
    begin = """
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
model = made("fsdp")
settings = {"lr": 1e-2, "moments": moments, **disk, "swap_gradients": True}
optimizer = deepnvme.optim.AdamW(model.parameters(), **settings)
"""
    save = """
train("fsdp", model, optimizer, range(3))
optimizer.save_state(folder / f"state-{rank}-of-{world}")
weights, moments = get_state_dict(model, optimizer)
with Checkpointer(folder / "run") as checkpointer:
    checkpointer.save(3, {"model": weights, "optimizer": moments})
answer = [one.tolist() for one in numbers(model, optimizer)]
"""
    load = """
weights, moments = get_state_dict(model, optimizer)
with Checkpointer(folder / "run") as checkpointer:
    state = checkpointer.restore(into={"model": weights, "optimizer": moments})
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
answer = [[one.tolist() for one in numbers(model, optimizer)]]
optimizer.close()
optimizer = deepnvme.optim.AdamW(model.parameters(), **settings)
optimizer.load_state(sorted(folder.glob("state-*")))
answer.append([one.tolist() for one in numbers(model, optimizer)])
train("fsdp", model, optimizer, range(3, 4))
"""
    folder = tmp_path / "job"
    folder.mkdir()
    saved = run(MODELS + begin + save, 2, folder, moments=moments)
    assert saved[0] == saved[1]
    for world in (1, 3):
        for answer in run(MODELS + begin + load, world, folder, moments=moments):
            assert isinstance(answer, list), answer
            checkpoint, files = answer
            if moments == "fp32":
                assert checkpoint == files == saved[0]
            # 8-bit moments are coded again where another rank's blocks begin elsewhere.
            assert len(checkpoint) == len(files) == len(saved[0])


def test_a_whole_state_is_split(tmp_path: Path) -> None:
    """The state dict of one process loads into a sharded optimizer, which it was trained with."""
    code = """
plain = made("whole")
theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
torch.manual_seed(3)
plain(torch.randn(3, 4, 33)).square().mean().backward()
theirs.step()
answer = []
for settings in ({}, disk):
    optimizer = deepnvme.optim.AdamW(made("fsdp").parameters(), lr=1e-2, **settings)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    state, expected = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    answer += [
        torch.equal(whole(state[index][name]), expected[index][name])
        for index in state
        for name in ("exp_avg", "exp_avg_sq")
    ]
"""
    for answer in run(MODELS + code, 2, tmp_path):
        assert len(answer) == 2 * 2 * 12, answer
        assert all(answer)


REFUSED: dict[str, tuple[str, str]] = {
    "files of columns": (
        """
model = made('tensor')
optimizer = deepnvme.optim.AdamW(model.parameters(), **disk)
train('tensor', model, optimizer, range(1))
optimizer.save_state(folder / f'state-{rank}')
""",
        "UnsupportedError: parameter .* no contiguous range.*state_dict",
    ),
    "parameters on disk": (
        "deepnvme.offload_parameters(made('fsdp'), memory='1MB', swap_dir=folder)",
        "UnsupportedError: 0.norm.weight is a DTensor.*deepnvme.optim.AdamW",
    ),
    "all on disk": (
        "deepnvme.offload(made('fsdp'), torch.optim.AdamW, memory='1MB', swap_dir=folder)",
        "UnsupportedError: 0.norm.weight is a DTensor.*deepnvme.optim.AdamW",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path) -> None:
    code, pattern = REFUSED[name]
    answers: list[Any] = run(MODELS + code, 2, tmp_path)
    for answer in answers:
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(answer)
    assert not [*tmp_path.glob("state-*")]
