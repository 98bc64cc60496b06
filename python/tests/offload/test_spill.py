"""``spill`` frees the memory of a model and its optimizer. ``restore`` fills the same tensors with the same bits."""

from __future__ import annotations

import copy
import signal
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme import optim
from deepnvme.errors import UnsupportedError
from process_memory import PROCESS_MEMORY
from programs import program
from ranks import run

from .test_training import Model, assert_same, batches, loss_of, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Mixed(nn.Module):
    """Tied, sliced, transposed and short tensors, buffers, and one that is smaller than a page."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.tied = self.up
        self.image = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        self.short = nn.Linear(64, 512).to(torch.bfloat16)
        both = torch.randn(2, 64, 64)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1].t())
        self.table: torch.Tensor
        self.little: torch.Tensor
        self.register_buffer("table", torch.randn(5000)[10:])
        self.register_buffer("flags", torch.rand(9000) < 0.5)
        self.register_buffer("little", torch.randn(3))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found.update({f"{name}.grad": one.grad for name, one in model.named_parameters() if one.grad is not None})
    if optimizer is not None:
        for index, state in enumerate(optimizer.state.values()):
            found.update({f"{index}.{name}": one for name, one in state.items() if torch.is_tensor(one)})
    return found


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: one.detach().contiguous().view(-1).view(torch.uint8).clone() for name, one in tensors.items()}


def optimizers(model: nn.Module) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    params = [one for one in model.parameters() if one.dtype == torch.float32]
    return {
        "torch": lambda: torch.optim.AdamW(params),
        "8 bits": lambda: optim.AdamW(params, moments="8bit"),
        "Lion": lambda: optim.Lion(params),
    }


@pytest.mark.parametrize("kind", ["torch", "8 bits", "Lion"])
@pytest.mark.parametrize("folders", [1, 3])
def test_the_same_tensors_and_bits(tmp_path: Path, kind: str, folders: int) -> None:
    torch.manual_seed(1)
    model = Mixed()
    optimizer = optimizers(model)[kind]()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    before = tensors_of(model, optimizer)
    expected = bits(before)
    layout = {name: (one.shape, one.stride(), one.dtype, one.storage_offset()) for name, one in before.items()}
    drives = [tmp_path / f"drive{number}" for number in range(folders)]
    for _ in range(2):
        spilled = deepnvme.spill(model, optimizer, swap_dir=drives)
        assert "on disk" in repr(spilled)
        assert getattr(model, "spilled") is spilled  # noqa: B009 (torch has no type for it)
        assert all(not any(drive.iterdir()) for drive in drives), "files have no names"
        sizes = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in (model.little,)}
        assert spilled.kept_bytes >= sum(sizes.values())
        assert {name: one.shape for name, one in before.items()} == {name: one[0] for name, one in layout.items()}
        spilled.restore()
        assert spilled.is_restored
        after = tensors_of(model, optimizer)
        assert {name: id(one) for name, one in after.items()} == {name: id(one) for name, one in before.items()}
        assert layout == {
            name: (one.shape, one.stride(), one.dtype, one.storage_offset()) for name, one in after.items()
        }
        found = bits(after)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        spilled.restore()
    with torch.no_grad():
        model.first.zero_()
    address = model.first.untyped_storage().data_ptr()
    assert model.second.untyped_storage().data_ptr() == address, "views of one tensor still share its memory"


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, twin))
    for _ in range(3):
        assert train(model, ours, 2) == train(twin, theirs, 2)
        refused = pytest.raises(RuntimeError, match=r"model is on disk.*restore")
        with deepnvme.spill(model, ours, swap_dir=tmp_path), refused:
            loss_of(model, batches(1)[0])
    # Also between a forward and a backward pass: what the pass still needs stays in memory.
    losses = []
    for one, optimizer in ((model, ours), (twin, theirs)):
        loss = loss_of(one, batches(1)[0])
        if one is model:
            deepnvme.spill(model, ours, swap_dir=tmp_path).restore()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert_same(twin, model)


USES: dict[str, Callable[[nn.Linear, torch.optim.Optimizer, Path], object]] = {
    "forward": lambda model, _, __: model(torch.ones(1, 64)),
    "backward": lambda model, _, __: model.weight.sum().backward(),  # type: ignore[no-untyped-call]
    "step": lambda _, optimizer, __: optimizer.step(),
    "print": lambda model, _, __: repr(model.weight),
    "copy": lambda model, _, __: copy.deepcopy(model),
    "torch.save": lambda model, _, folder: torch.save(model.state_dict(), folder / "a.pt"),
    "deepnvme.save": lambda model, _, folder: deepnvme.save(model.state_dict(), folder / "b.pt"),
    "save of the state": lambda _, optimizer, folder: deepnvme.save(optimizer.state_dict(), folder / "b.pt"),
    "a checkpoint": lambda model, _, folder: deepnvme.Checkpointer(folder / "run").save(1, model.state_dict()),
    "in place": lambda model, _, __: model.weight.detach().mul_(2),
    "numpy": lambda model, _, __: model.weight.detach().numpy(),
    "load": lambda model, _, __: model.load_state_dict(nn.Linear(64, 64).state_dict()),
    "write": lambda model, _, folder: deepnvme.write(model.weight.detach(), folder / "c"),
    "again": lambda model, _, folder: deepnvme.spill(model, swap_dir=folder / "swap"),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_a_use_is_refused(tmp_path: Path, name: str, kind: Any) -> None:
    """Nothing computes with values that are not there, and the values come back."""
    model = nn.Linear(64, 64)
    optimizer = kind(model.parameters())
    model(torch.randn(2, 64)).square().mean().backward()
    optimizer.step()
    expected = bits(tensors_of(model, optimizer))
    refused = pytest.raises((RuntimeError, ValueError, UnsupportedError), match=r"(?s)(on disk|spilled).*restore")
    with deepnvme.spill(model, optimizer, swap_dir=tmp_path / "swap"), refused:
        USES[name](model, optimizer, tmp_path)
    found = bits(tensors_of(model, optimizer))
    if name == "load":
        assert found.pop("bias").shape == expected.pop("bias").shape, "a small tensor is in memory, and is loaded"
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    # torch begins a file and leaves it.
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.name != "a.pt"]


def test_the_memory_is_given_back(tmp_path: Path) -> None:
    code = f"""
{PROCESS_MEMORY}
import torch, deepnvme
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(20)])
small = torch.nn.ParameterList([torch.randn(5000) for _ in range(1000)])
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.randn(8, 1024)).square().mean().backward()
    optimizer.step()
step()
deepnvme.spill([model, small], optimizer, swap_dir={str(tmp_path)!r}).restore()
for _ in range(2):
    step()
    before = memory_bytes("VmRSS")
    restart_peak()
    spilled = deepnvme.spill([model, small], optimizer, swap_dir={str(tmp_path)!r})
    assert spilled.nbytes > 350e6 and spilled.kept_bytes < 1e6, spilled
    freed = before - memory_bytes("VmRSS")
    assert freed > 0.98 * spilled.nbytes, (freed, spilled)
    grown = memory_bytes("VmHWM") - before
    assert grown < 40 << 20, grown
    restart_peak()
    spilled.restore()
    grown = memory_bytes("VmHWM") - before
    assert grown < 40 << 20, grown
"""
    with program(code) as running:
        assert running.wait() == 0


def test_what_others_use_stays(tmp_path: Path) -> None:
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.ModuleList(layers)
    row = layers[0].weight.detach()[3]
    layers[1].weight.data.share_memory_()  # type: ignore[no-untyped-call]
    squares = layers[2].weight.square().sum()
    state = layers[3].state_dict()
    expected = bits(tensors_of(model))
    with deepnvme.spill(model, swap_dir=tmp_path) as spilled:
        assert spilled.nbytes <= 64 * 64 * 4, "a graph needs the tensor, and not only its memory"
        assert spilled.nbytes + spilled.kept_bytes == sum(one.nbytes for one in model.parameters())
        row += 1
    assert torch.equal(layers[0].weight[3], row)
    del row, state
    squares.backward()  # type: ignore[no-untyped-call]
    assert layers[2].weight.grad is not None
    assert torch.equal(layers[2].weight.grad, 2 * layers[2].weight)
    del squares
    spilled = deepnvme.spill(model, swap_dir=tmp_path)
    assert spilled.nbytes == 4 * 64 * 64 * 4, "three weights and a gradient"
    spilled.restore()
    layers[0].weight.data[3] -= 1
    found = bits(tensors_of(model))
    assert all(torch.equal(found[key], expected[key]) for key in expected if not key.startswith("0."))


def test_memory_that_torch_has_not_allocated(tmp_path: Path) -> None:
    """Loaded, mapped and foreign memory."""
    weights = {name: torch.randn(64, 64) for name in ("a", "b", "c")}
    deepnvme.save(weights, tmp_path / "weights.safetensors")
    loaded = deepnvme.load(tmp_path / "weights.safetensors")
    model = nn.ParameterDict(loaded)
    model["c"] = nn.Parameter(torch.frombuffer(bytearray(weights["c"].numpy().tobytes()), dtype=torch.float32))
    del loaded
    for _ in range(2):
        spilled = deepnvme.spill(model, swap_dir=tmp_path / "swap")
        assert spilled.nbytes >= 3 * 64 * 64 * 4
        with pytest.raises(RuntimeError, match="on disk"):
            model["c"].sum()
        spilled.restore()
        for name, one in weights.items():
            assert torch.equal(model[name].view(64, 64), one)


def test_other_data_given_in_the_meantime_stays(tmp_path: Path) -> None:
    layers = [nn.Linear(64, 64) for _ in range(2)]
    kept = layers[1].weight.detach().clone()
    with deepnvme.spill(layers, swap_dir=tmp_path):
        layers[0].weight.data = torch.full((64, 64), 3.0)
    assert layers[0].weight.eq(3).all()
    assert torch.equal(layers[1].weight, kept)


def test_a_closed_engine_loses_nothing(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    expected = model.weight.detach().clone()
    with deepnvme.Engine() as engine:
        deepnvme.spill(model, swap_dir=tmp_path, engine=engine)
    spilled: deepnvme.Spilled = model.spilled  # type: ignore[assignment]
    spilled.restore()
    assert torch.equal(model.weight, expected)


def test_a_model_that_is_on_disk_already(tmp_path: Path) -> None:
    """Its parameters stay there; the rest is moved."""
    torch.manual_seed(1)
    model = Model()
    twin = copy.deepcopy(model)
    model, optimizer = deepnvme.offload(model, torch.optim.AdamW, lr=1e-2, memory="1MB", swap_dir=tmp_path)
    plain = optim.AdamW(twin.parameters(), lr=1e-2)
    assert train(model, optimizer, 2) == train(twin, plain, 2)
    deepnvme.spill(model, optimizer, swap_dir=tmp_path).restore()
    assert train(model, optimizer, 2) == train(twin, plain, 2)
    optimizer.close()


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat))
    (model.weight.mH @ torch.randn(64, 64, dtype=torch.cfloat)).real.sum().backward()  # type: ignore[no-untyped-call]
    model.register_buffer("conjugate", torch.randn(5000, dtype=torch.cfloat).conj())
    model.register_buffer("negative", torch._neg_view(torch.randn(5000)))
    assert model.weight.grad is not None
    assert model.weight.grad.is_conj()

    def values() -> list[torch.Tensor]:
        return [one.resolve_conj().resolve_neg().clone() for one in tensors_of(model).values()]

    expected = values()
    with deepnvme.spill(model, swap_dir=tmp_path) as spilled:
        assert spilled.nbytes >= 64 * 64 * 8 + 5000 * 8 + 5000 * 4
    assert all(map(torch.equal, values(), expected))


def test_memory_that_another_library_has_stays(tmp_path: Path) -> None:
    table, held = nn.Buffer(torch.randn(1 << 16)), nn.Parameter(torch.randn(1 << 16))
    model = nn.Module()
    model.table, model.held = table, held
    shared = torch.utils.dlpack.from_dlpack(table)
    storage = held.untyped_storage()
    with deepnvme.spill(model, swap_dir=tmp_path) as spilled:
        assert (spilled.nbytes, spilled.kept_bytes) == (0, 2 * 4 << 16)
        assert torch.equal(shared, table)
    assert storage.data_ptr() == held.data_ptr()


def test_a_thread_that_changes_a_tensor_is_noticed(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    before = model.weight.detach().clone()

    class Changing:
        """An engine that writes while another thread changes a weight."""

        def write_batch(self, items: Any) -> int:
            def change() -> None:
                with torch.no_grad():
                    model.weight[0] += 1

            thread = threading.Thread(target=change)
            thread.start()
            thread.join()
            return deepnvme.write_batch(items)

    engine: Any = Changing()
    with pytest.raises(RuntimeError, match=r"weight was changed while spill wrote it.*nothing was spilled"):
        deepnvme.spill(model, swap_dir=tmp_path, engine=engine)
    deepnvme.spill(model, swap_dir=tmp_path).restore()
    before[0] += 1
    assert torch.equal(model.weight, before)


def test_restore_in_inference_mode(tmp_path: Path) -> None:
    """A program may still be in the mode of the generation."""
    model = nn.Linear(64, 64)
    with torch.inference_mode():
        spilled = deepnvme.spill(model, swap_dir=tmp_path)
        spilled.restore()
    model(torch.randn(4, 64)).sum().backward()
    assert deepnvme.spill(model, swap_dir=tmp_path).nbytes > 0
    model.spilled.restore()  # type: ignore[operator,union-attr]


def test_sparse_gradients_stay(tmp_path: Path) -> None:
    model = nn.Embedding(2000, 64, sparse=True)
    model(torch.arange(50)).sum().backward()
    with deepnvme.spill(model, swap_dir=tmp_path) as spilled:
        assert spilled.nbytes == 2000 * 64 * 4
    assert model.weight.grad is not None
    assert model.weight.grad.coalesce().values().eq(1).all()


def test_restored_memory_is_ordinary(tmp_path: Path) -> None:
    """It can be resized, and later cycles take no more."""
    code = f"""
{PROCESS_MEMORY}
import torch, deepnvme
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(32)])
def backward():
    model(torch.randn(8, 1024)).square().mean().backward()
found = []
for _ in range(6):
    backward()
    deepnvme.spill(model, swap_dir={str(tmp_path)!r}).restore()
    model.zero_grad()
    found.append(memory_bytes("VmRSS"))
assert max(found[3:]) - max(found[:3]) < 40e6, found
model[0].weight.data.untyped_storage().resize_(0)
"""
    with program(code) as running:
        assert running.wait() == 0


def test_an_interrupt_between_two_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64)
    register = nn.Module.register_forward_pre_hook

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        register(*arguments, **settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deepnvme.spill(model, swap_dir=tmp_path)
    monkeypatch.undo()
    assert model(torch.ones(1, 64)).shape == (1, 64)


def test_names_shared_layers_and_copies(tmp_path: Path) -> None:
    shared = nn.Linear(64, 64)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(64, 64))
    refused = pytest.raises(UnsupportedError, match=r"0.weight is on disk already.*restore")
    with deepnvme.Engine() as engine:
        with deepnvme.spill(first, swap_dir=tmp_path, engine=engine), refused:
            deepnvme.spill(second, swap_dir=tmp_path)
        assert torch.equal(next(copy.deepcopy(first).parameters()), shared.weight)
    named = nn.ModuleDict({"spilled": nn.Linear(64, 64)})
    with pytest.raises(UnsupportedError, match="'spilled' of its own"):
        deepnvme.spill(named, swap_dir=tmp_path)


def test_wrong_arguments(tmp_path: Path) -> None:
    model, wrong = nn.Linear(64, 64), cast("Any", 3)
    for arguments, text in (
        (([],), "got none"),
        ((torch.ones(3),), "takes a torch.nn.Module, not Tensor"),
        ((model, model), "optimizer is a Linear"),
    ):
        with pytest.raises(TypeError, match=text):
            deepnvme.spill(*arguments, swap_dir=tmp_path)
    with pytest.raises(TypeError, match="swap_dir is 3"):
        deepnvme.spill(model, swap_dir=wrong)


def test_killed_while_it_is_on_disk(tmp_path: Path) -> None:
    """The last checkpoint is whole, and no file is left."""
    code = f"""
import os, signal, torch, deepnvme
torch.manual_seed(1)
model = torch.nn.Linear(512, 512)
with deepnvme.Checkpointer({str(tmp_path / "run")!r}) as checkpointer:
    checkpointer.save(1, model.state_dict())
deepnvme.spill(model, swap_dir={str(tmp_path / "swap")!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    with program(code) as running:
        assert running.wait() == -signal.SIGKILL
    torch.manual_seed(1)
    expected = nn.Linear(512, 512)
    restored = deepnvme.Checkpointer(tmp_path / "run").restore()
    assert torch.equal(restored["weight"], expected.weight)
    assert not [*(tmp_path / "swap").iterdir()]


def test_shards_of_fsdp(tmp_path: Path) -> None:
    code = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (world,))
def trained(is_spilled):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(65, 65) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moved = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 65)).square().mean().backward()
        optimizer.step()
        if is_spilled:
            with deepnvme.spill(model, optimizer, swap_dir=folder / f"swap{rank}") as spilled:
                moved.append(spilled.nbytes)
        optimizer.zero_grad()
    return [one.full_tensor() for one in model.parameters()], moved
(some, moved), (others, _) = trained(True), trained(False)
answer = [all(map(torch.equal, some, others)), min(moved)]
"""
    for same, moved in run(code, 2, tmp_path):
        assert same
        # The weights, gradients and two moments of three layers, half of each.
        assert moved >= 4 * 3 * 65 * 32 * 4
