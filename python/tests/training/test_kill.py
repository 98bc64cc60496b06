"""A training run that is killed in the middle of a step continues from its last checkpoint, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from programs import program

from . import IMPORTS, language_model

if TYPE_CHECKING:
    from pathlib import Path

STEPS, EVERY, KILLED_IN = 14, 4, 10
STATE_MEMORY, PARAMETER_MEMORY = 128 << 10, 256 << 10

CHILD = f"""{IMPORTS}
import time
import torch, deepnvme, language_model

torch.set_num_threads(1)
swap_dir, saved = ".", "../checkpoints"
model = language_model.Model()
if parameters_on_disk:
    offloading = deepnvme.offload_parameters(model, memory={PARAMETER_MEMORY}, swap_dir=swap_dir)
optimizer = language_model.adamw(deepnvme.optim.AdamW, model, swap_dir=swap_dir, memory={STATE_MEMORY})
if parameters_on_disk:
    offloading.attach(optimizer)
training = language_model.Training(model, optimizer, {STEPS})

borrows = stop = 0
plain = deepnvme.Swapper.borrow
def borrow(swapper, key, **options):
    global borrows
    # Count exclusive borrows only: the forward pass borrows blocks as well, but shares them.
    borrows += not options.get("shared", False)
    if stop and borrows == stop:
        print("in the middle", flush=True)
        time.sleep(1000)
    return plain(swapper, key, **options)
deepnvme.Swapper.borrow = borrow

checkpointer = deepnvme.Checkpointer(saved, keep=2)
for step in range({STEPS}):
    if step == {KILLED_IN}:
        stop = borrows + each // 2
    before = borrows
    training.step(step)
    each = borrows - before
    assert each > 20, each
    if step % {EVERY} == {EVERY} - 1:
        checkpointer.save(step, {{
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": training.scheduler.state_dict(),
        }})
"""


@pytest.mark.parametrize("parameters_on_disk", [False, True])
def test_killed_in_the_middle_of_a_step(folder: Path, parameters_on_disk: bool) -> None:
    saved = folder.with_name("checkpoints")
    with program(f"parameters_on_disk = {parameters_on_disk}\n{CHILD}", folder=folder) as training_one:
        assert training_one.stdout.readline() == "in the middle\n"
        training_one.kill()
    assert list(folder.iterdir()) == [], "the swap files went with the process"

    with deepnvme.Checkpointer(saved) as checkpointer:
        last = checkpointer.latest()
        assert last is not None
        assert last.step == 7
        state = checkpointer.restore()
    model = language_model.Model()
    # Wrong values, unless they come from the checkpoint.
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    optimizer: Any
    if parameters_on_disk:
        offloading = deepnvme.offload_parameters(model, memory=PARAMETER_MEMORY, swap_dir=folder)
        offloading.load_state_dict(state["model"])
    else:
        model.load_state_dict(state["model"])
    optimizer = language_model.adamw(deepnvme.optim.AdamW, model, swap_dir=folder, memory=STATE_MEMORY)
    if parameters_on_disk:
        offloading.attach(optimizer)
    training = language_model.Training(model, optimizer, STEPS)
    optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    losses = [training.step(step) for step in range(last.step + 1, STEPS)]

    whole = language_model.Model()
    uninterrupted = language_model.Training(whole, language_model.adamw(deepnvme.optim.AdamW, whole), STEPS)
    assert losses == [uninterrupted.step(step) for step in range(STEPS)][last.step + 1 :]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name
    theirs = uninterrupted.optimizer.state_dict()
    for index, state_of_one in optimizer.state_dict()["state"].items():
        for name, tensor in state_of_one.items():
            assert torch.equal(tensor, theirs["state"][index][name]), (index, name)
