"""``deepnvme.offload``: errors in between, the end of a run, and models that change."""

from __future__ import annotations

import copy
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme.errors import ClosedError, UnsupportedError

from .test_offload import MEMORY, WIDTH, Model, batches, check_same, made, train, values

if TYPE_CHECKING:
    from pathlib import Path


def test_training_goes_on_after_an_error_in_between(tmp_path: Path) -> None:
    class FailingError(Exception):
        pass

    expected = made()
    losses = train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False))
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    first = train(model, optimizer, batches()[:1])

    def fail(*_: Any) -> None:
        raise FailingError

    hook = model.blocks[3].register_forward_hook(fail)
    for _ in range(3):
        with pytest.raises(FailingError):
            model(batches()[1])
    hook.remove()
    assert first + train(model, optimizer, batches()[1:]) == losses
    optimizer.close()


def test_a_graph_that_is_kept(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.SGD, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    kept = model(batches()[0]).square().mean()
    kept.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    # The keys of the kept activations are taken while others are saved.
    train(model, optimizer, batches()[1:])
    with pytest.raises(RuntimeError, match="changed"):
        kept.backward()
    optimizer.close()


def test_state_is_saved_and_resumed(tmp_path: Path) -> None:
    expected = made()
    losses = train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False))
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path / "swap")
    first = train(model, optimizer, batches()[:2])
    optimizer.save_state(tmp_path / "optimizer.safetensors")
    model.offloading.save(tmp_path / "model.safetensors")
    optimizer.close()
    with torch.device("meta"):
        bare: Any = Model()
    model, optimizer = deepnvme.offload(bare, torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path / "swap")
    model.offloading.load_state_dict(deepnvme.load(tmp_path / "model.safetensors", lazy=True))
    optimizer.load_state(tmp_path / "optimizer.safetensors")
    assert first + train(model, optimizer, batches()[2:]) == losses
    optimizer.close()


def test_the_end(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    train(model, optimizer)
    optimizer.close()
    optimizer.close()
    assert model.offloading.is_closed
    # The model is in memory again, and trained as any other.
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with pytest.raises(ClosedError):
        optimizer.step()
    again, other = deepnvme.offload(model, torch.optim.SGD, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    train(again, other)
    other.close()


def test_parameters_may_come_back_first(tmp_path: Path) -> None:
    expected = made()
    losses = train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False))
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    first = train(model, optimizer, batches()[:2])
    model.offloading.close()
    assert first + train(model, optimizer, batches()[2:]) == losses
    optimizer.close()


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    expected = made()
    losses = train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, foreach=False))
    runs = [
        deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path, checksums=True)
        for _ in range(2)
    ]
    found: list[list[float]] = [[], []]
    for batch in batches():
        for index, (model, optimizer) in enumerate(runs):
            found[index] += train(model, optimizer, [batch])
    assert found == [losses, losses]
    for _, optimizer in runs:
        optimizer.close()


def test_the_bound_that_is_enough(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"blocks\.\d|head") as refused:
        deepnvme.offload(made(), torch.optim.AdamW, memory=64 << 10, swap_dir=tmp_path)
    enough = int(str(refused.value).rpartition("memory=")[2].split()[0])
    check_same(tmp_path, memory=enough)


@pytest.mark.parametrize(("width", "layers"), [(1, 1), (30, 1), (33, 40), (64, 3), (100, 2)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_bound_that_is_enough_for_a_small_model(tmp_path: Path, width: int, layers: int, kind: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    with pytest.raises(MemoryError) as refused:
        deepnvme.offload(build(), kind, lr=0.1, memory=1, swap_dir=tmp_path)
    enough = int(str(refused.value).rpartition("memory=")[2].split()[0])
    model, optimizer = deepnvme.offload(build(), kind, lr=0.1, memory=enough, swap_dir=tmp_path)
    for _ in range(2):
        model(torch.randn(3, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_a_backward_pass_for_some_parameters(tmp_path: Path) -> None:
    plain = made()
    model, optimizer = deepnvme.offload(made(), torch.optim.SGD, lr=0.1, memory=MEMORY, swap_dir=tmp_path)
    for one in (plain, model):
        one(batches()[0]).square().mean().backward(inputs=[*one.blocks[2].parameters()])
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False).step()
    optimizer.close()
    for mine, theirs in zip(values(model), values(plain), strict=True):
        assert torch.equal(mine, theirs)


def test_a_child_closes_nothing(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.SGD, lr=0.1, memory=MEMORY, swap_dir=tmp_path)
    losses = train(model, optimizer)
    child = os.fork()
    if child == 0:
        try:
            optimizer.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(train(model, optimizer)) == len(losses)
    optimizer.close()


def test_optimizers_that_cannot(tmp_path: Path) -> None:
    model = made()
    settings: dict[str, Any] = {"memory": MEMORY, "swap_dir": tmp_path}
    with pytest.raises(UnsupportedError, match=r"LBFGS.*AdamW"):
        deepnvme.offload(model, torch.optim.LBFGS, **settings)
    with pytest.raises(TypeError, match=r"pass its class.*torch\.optim\.SGD"):
        deepnvme.offload(model, torch.optim.SGD(model.parameters(), lr=1.0), **settings)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a class"):
        deepnvme.offload(model, "adamw", **settings)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        deepnvme.offload([], torch.optim.SGD, **settings)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="swap_gradients"):
        deepnvme.offload(model, torch.optim.SGD, swap_gradients=True, **settings)
    # Nothing has changed.
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3))


def test_a_setting_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    model, before = made(), values(made())
    wrong: list[dict[str, Any]] = [{"lr": -1.0}, {"no_such": 1}, {"params": []}]
    for settings in wrong:
        with pytest.raises((ValueError, TypeError)):
            deepnvme.offload(model, torch.optim.AdamW, memory=MEMORY, swap_dir=tmp_path, **settings)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(values(model), before, strict=True))
        assert not [*tmp_path.iterdir()]
    train(model, torch.optim.AdamW(model.parameters()))


def test_a_model_is_offloaded_once(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, memory=MEMORY, swap_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="already"):
        deepnvme.offload(model, torch.optim.AdamW, memory=MEMORY, swap_dir=tmp_path)
    train(model, optimizer)
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="disk"):
            act(model)
        with pytest.raises(TypeError, match="disk"):
            act(optimizer)
    optimizer.close()


def test_other_optimizers_have_no_plan() -> None:
    assert deepnvme.optim.AdamW(made().parameters()).plan is None


def test_changes_of_the_model_are_refused(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    train(model, optimizer)
    with pytest.raises(RuntimeError, match=r"offloading.close\(\) first"):
        model.to(torch.bfloat16)
    model.blocks[0].up.weight, model.blocks[1].up.weight = model.blocks[1].up.weight, model.blocks[0].up.weight
    with pytest.raises(UnsupportedError, match=r"blocks\.\d\.up\.weight"):
        model(batches()[0])
    optimizer.close()


def test_parameters_that_are_added(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    train(model, optimizer)
    model.extra = nn.Linear(WIDTH, WIDTH)
    model.register_forward_hook(lambda module, _, result: module.extra(result))
    optimizer.add_param_group({"params": model.extra.parameters()})
    before = model.extra.weight.detach().clone()
    train(model, optimizer)
    assert not torch.equal(model.extra.weight, before)
    optimizer.close()


def test_a_step_in_the_middle_of_a_backward_pass(tmp_path: Path) -> None:
    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory=MEMORY, swap_dir=tmp_path)
    train(model, optimizer)
    told: list[str] = []

    def step(gradient: torch.Tensor) -> torch.Tensor:
        try:
            optimizer.step()
        except RuntimeError as error:
            told.append(str(error))
        return gradient

    hidden = model.blocks[0](batches()[0])
    for block in model.blocks[1:]:
        hidden = block(hidden)
    hidden.register_hook(step)
    model.head(hidden).square().mean().backward()
    optimizer.zero_grad()
    # Either it refuses, or it is a step with the gradients that there are. The next one works.
    train(model, optimizer)
    optimizer.close()
