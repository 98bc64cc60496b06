"""State dicts, refusals, and failures in the middle of training."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme.errors import ClosedError, UnsupportedError

from .test_training import MEMORY, Model, batches, closure_of, loss_of, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def offloaded(tmp_path: Path, memory: int = MEMORY, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Model()
    return model, deepnvme.offload_parameters(model, memory=memory, swap_dir=tmp_path, **options)


def test_a_state_goes_out_and_in(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)
    state = model.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr(), "what is tied stays so"
    torch.manual_seed(2)
    other = Model()
    expected = loss_of(other, batches(1)[0])
    offloading.load_state_dict(other.state_dict())
    assert torch.equal(loss_of(model, batches(1)[0]), expected)
    lacking = {name: tensor for name, tensor in state.items() if "blocks.3" not in name}
    with pytest.raises(RuntimeError, match=r"blocks\.3\.up\.weight"):
        offloading.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match=r"blocks\.3\.up\.weight is \(5,\)"):
        offloading.load_state_dict({**state, "blocks.3.up.weight": torch.ones(5)})
    offloading.load_state_dict(lacking, strict=False)
    assert torch.equal(model.state_dict()["blocks.3.up.weight"], other.state_dict()["blocks.3.up.weight"])
    deepnvme.save(model.state_dict(), tmp_path / "model.safetensors")
    assert deepnvme.load(tmp_path / "model.safetensors").keys() == state.keys()


def test_parameters_in_memory_for_a_while(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)
    weight = model.blocks[1].up.weight
    assert weight.shape == (256, 64)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight is on disk"):
        weight.isnan()
    with offloading.gathered([weight, model.blocks[4].up.weight]):
        before = weight.detach().clone()
        assert before.isfinite().all()
    with offloading.gathered([weight], write=True), torch.no_grad():
        weight.mul_(2)
    with offloading.gathered(model.blocks[1].parameters()):
        assert torch.equal(weight, before * 2)
        with pytest.raises(RuntimeError, match="in use"), offloading.gathered([weight], write=True):
            pass
    with pytest.raises(MemoryError, match="memory for"), offloading.gathered(model.parameters()):
        pass
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight is on disk"):
        weight.isnan()


def test_an_optimizer_that_was_not_attached(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batches(1)[0]).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="attach"):
        optimizer.step()
    offloading.attach(optimizer)
    before = loss_of(model, batches(1)[0]).item()
    optimizer.step()
    assert loss_of(model, batches(1)[0]).item() < before
    with pytest.raises(UnsupportedError, match="LBFGS"):
        offloading.attach(torch.optim.LBFGS(model.parameters()))


def test_closures_and_groups(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)
    torch.manual_seed(1)
    plain = Model()
    found = []
    for one in (plain, model):
        decay = [parameter for parameter in one.parameters() if parameter.ndim > 1]
        rest = [parameter for parameter in one.parameters() if parameter.ndim == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if one is model:
            offloading.attach(optimizer)
        found.append([optimizer.step(closure_of(one, optimizer)).item() for _ in range(4)])
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(decay), len(rest)]
        found[-1].append(sum(float(state["exp_avg"].sum()) for state in optimizer.state_dict()["state"].values()))
    assert found[0] == found[1]


def test_a_backward_that_fails_in_the_middle(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.clone()

        @staticmethod
        def backward(_ctx: Any, *_: Any) -> Any:
            raise OSError("the middle")

    handle = model.blocks[2].register_forward_hook(lambda _module, _args, output: Fails.apply(output))
    for _ in range(3):
        with pytest.raises(OSError, match="the middle"):
            loss_of(model, batches(1)[0]).backward()  # type: ignore[no-untyped-call]
    handle.remove()
    model.zero_grad()
    torch.manual_seed(1)
    plain = Model()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    offloading.attach(optimizers[1])
    assert train(model, optimizers[1], 3) == train(plain, optimizers[0], 3)


def test_in_place_changes_are_detected(tmp_path: Path) -> None:
    """As autograd detects it for tensors that it saves itself."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(hidden).sigmoid()
            answer = hidden.exp()
            hidden.add_(1)
            return answer + hidden

    model = nn.Sequential(Changing(), Changing())
    deepnvme.offload_parameters(model, memory="1MB", swap_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"inplace|in place"):
        model(torch.randn(3, 256)).sum().backward()


def test_refusals(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)
    with pytest.raises(UnsupportedError, match="offloaded already"):
        deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path)
    with pytest.raises(ValueError, match="none of the model's parameters"):
        offloading.attach(torch.optim.SGD(nn.Linear(3, 3).parameters()))
    for alone in (next(model.parameters()), model):
        with pytest.raises(TypeError, match="several parameters"), offloading.gathered(alone):
            pass
    offloading.close()
    offloading.close()
    with pytest.raises(ClosedError):
        offloading.attach(torch.optim.SGD(model.parameters()))
    with pytest.raises(ClosedError):
        offloading.load_state_dict({})
    with pytest.raises(MemoryError, match=r"alone needs"):
        deepnvme.offload_parameters(model, memory=10_000, swap_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="buffer running_mean is on the meta"), torch.device("meta"):
        deepnvme.offload_parameters(nn.BatchNorm1d(3), memory=MEMORY, swap_dir=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(deepnvme.errors.NotFolderError):
        deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path / "file" / "below")
    expected = loss_of(model, batches(1)[0])
    again = deepnvme.offload_parameters(model, memory=MEMORY, swap_dir=tmp_path, checksums=True)
    assert torch.equal(loss_of(model, batches(1)[0]), expected)
    again.close()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offloading.attach(optimizer)
    train(model, optimizer, 2)
    gone = weakref.ref(offloading)
    del model, offloading, optimizer
    gc.collect()
    assert gone() is None
    assert list(tmp_path.iterdir()) == []
    # Unrelated optimizers are no longer checked.
    weight = nn.Parameter(torch.ones(3))
    weight.sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([weight], lr=0.1).step()


CHANGES: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "filled": lambda _, weight: weight.fill_(0),
    "initialised": lambda _, weight: nn.init.zeros_(weight),
    "by its data": lambda _, weight: weight.data.fill_(1),
    "other data": lambda _, weight: setattr(weight, "data", torch.ones_like(weight)),
    "converted": lambda model, _: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_on_disk_is_refused(tmp_path: Path, change: str) -> None:
    model, offloading = offloaded(tmp_path)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad(), pytest.raises(RuntimeError, match="on disk"):
        CHANGES[change](model, model.blocks[1].up.weight)
    loss_of(model, batches(1)[0])
    offloading.close()
    state = model.state_dict()
    assert all(
        torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype for name, tensor in expected.items()
    )


def test_a_change_without_exclusive_access_is_refused(tmp_path: Path) -> None:
    model, offloading = offloaded(tmp_path)
    weight = model.blocks[1].up.weight
    refusal = pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight.*write=True")
    with refusal, offloading.gathered([weight]), torch.no_grad():
        weight.zero_()
    loss_of(model, batches(1)[0])
    with offloading.gathered([weight]):
        assert weight.abs().sum() > 0


def test_threads_compute_at_the_same_time(tmp_path: Path) -> None:
    """A group that two threads load at once stays until neither needs it."""
    model, offloading = offloaded(tmp_path)
    data = batches(4)
    with torch.no_grad():
        expected = [loss_of(model, one) for one in data]
    wrong: list[object] = []

    def compute(number: int) -> None:
        try:
            for _ in range(20):
                with torch.no_grad():
                    found = loss_of(model, data[number])
                if not torch.equal(found, expected[number]):
                    wrong.append(found)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=compute, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    offloading.close()


@pytest.mark.parametrize("is_root", [True, False])
def test_memory_that_is_too_little_is_answered_with_enough(tmp_path: Path, is_root: bool) -> None:
    def make() -> nn.Module:
        layer = nn.Linear(256, 256)
        return layer if is_root else nn.Sequential(layer, nn.Linear(256, 256))

    name = r"the model itself \(Linear\)" if is_root else "0"
    with pytest.raises(MemoryError, match=rf"too little: {name} alone needs .* bytes; memory=\d+ is enough") as error:
        deepnvme.offload_parameters(make(), memory=100_000, swap_dir=tmp_path)
    enough = int(str(error.value).partition("memory=")[2].partition("memory=")[2].split()[0])
    with pytest.raises(MemoryError):
        deepnvme.offload_parameters(make(), memory=enough - 1, swap_dir=tmp_path)
    model = make()
    offloading = deepnvme.offload_parameters(model, memory=enough, swap_dir=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offloading.attach(optimizer)
    for _ in range(2):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    offloading.close()
