"""200 steps of a small language model give bit-identical losses and parameters to torch in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme

from . import language_model
from .conftest import is_bitwise

if TYPE_CHECKING:
    from pathlib import Path

STEPS, SHORT_STEPS = 200, 6
STATE_MEMORY, PARAMETER_MEMORY = 256 << 10, 256 << 10


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def assert_same_state(optimizer: Any, theirs: dict[str, Any]) -> None:
    state = optimizer.state_dict()["state"]
    assert state.keys() == theirs["state"].keys()
    for index, expected in theirs["state"].items():
        assert state[index].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[index][name], tensor), (index, name)


class Reference:
    """Train the same model with torch in memory."""

    def __init__(self) -> None:
        model = language_model.Model()
        optimizer = language_model.adamw(torch.optim.AdamW, model, foreach=False)
        training = language_model.Training(model, optimizer, STEPS)
        self.losses = [training.step(step) for step in range(STEPS)]
        self.parameters = model.state_dict()
        self.optimizer = optimizer.state_dict()


@pytest.fixture(scope="module")
def reference(one_thread: None) -> Reference:
    return Reference()


@pytest.mark.parametrize("parameters_on_disk", [False, True])
def test_the_losses_of_torch(tmp_path: Path, reference: Reference, parameters_on_disk: bool) -> None:
    model = language_model.Model()
    count = sum(param.numel() for param in model.parameters())
    assert 100_000 < count < 300_000
    offloading = None
    if parameters_on_disk:
        offloading = deepnvme.offload_parameters(model, memory=PARAMETER_MEMORY, swap_dir=tmp_path)
        assert offloading.parameter_bytes > 1.5 * PARAMETER_MEMORY
    optimizer = language_model.adamw(deepnvme.optim.AdamW, model, swap_dir=tmp_path, memory=STATE_MEMORY)
    if offloading is not None:
        offloading.attach(optimizer)
    training = language_model.Training(model, optimizer, STEPS)
    losses = [training.step(step) for step in range(STEPS)]

    assert mean(losses[-20:]) < 0.6 * losses[0]
    if is_bitwise():
        assert losses == reference.losses
        assert model.state_dict().keys() == reference.parameters.keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, reference.parameters[name]), name
    else:
        assert losses == pytest.approx(reference.losses, rel=0.05)
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in reference.optimizer["param_groups"]
    ]

    stats = optimizer.swap_stats()
    assert stats is not None
    assert stats.stored_bytes >= 2 * 4 * count > 3 * STATE_MEMORY
    assert stats.resident_bytes_peak <= STATE_MEMORY
    # It was never completely in memory: each step but the first has read most of it.
    assert stats.bytes_read > (STEPS - 1) * (stats.stored_bytes - STATE_MEMORY)
    if offloading is not None:
        assert offloading.stats().resident_bytes_peak <= PARAMETER_MEMORY
        assert offloading.stats().bytes_read > STEPS * language_model.MICRO_BATCHES * offloading.parameter_bytes
        offloading.close()
        for name, tensor in model.state_dict().items():
            assert not is_bitwise() or torch.equal(tensor, reference.parameters[name]), name
    # In both cases the parameters are in memory now.
    if is_bitwise():
        assert_same_state(optimizer, reference.optimizer)


def short(where: Path | None, *, parameters_on_disk: bool) -> language_model.Training:
    """Return a training of bf16 parameters, in memory or in a folder."""
    model = language_model.Model().bfloat16()
    options: dict[str, Any] = {} if where is None else {"swap_dir": where, "memory": STATE_MEMORY}
    optimizer = language_model.adamw(deepnvme.optim.AdamW, model, **options)
    if where is not None and parameters_on_disk:
        deepnvme.offload_parameters(model, memory=PARAMETER_MEMORY // 2, swap_dir=where).attach(optimizer)
    return language_model.Training(model, optimizer, SHORT_STEPS)


@pytest.mark.parametrize("parameters_on_disk", [False, True])
def test_the_state_of_short_parameters(folder: Path, parameters_on_disk: bool) -> None:
    """Works also while parameters are on disk, as for checkpoints during training."""
    found = []
    for where in (None, folder):
        training = short(where, parameters_on_disk=parameters_on_disk)
        for step in range(3):
            training.step(step)
        found.append(training.optimizer)
    assert_same_state(found[1], found[0].state_dict())


@pytest.mark.parametrize("parameters_on_disk", [False, True])
def test_short_parameters(tmp_path: Path, parameters_on_disk: bool) -> None:
    """The fp32 master weights of bf16 parameters start with their values, in memory or on disk."""

    def train(where: Path | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        training = short(where, parameters_on_disk=parameters_on_disk)
        losses = [training.step(step) for step in range(SHORT_STEPS)]
        return losses, training.model.state_dict()

    expected, tensors = train(None)
    losses, found = train(tmp_path)
    assert losses == expected
    assert expected[-1] < expected[0]
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
