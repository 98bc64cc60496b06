"""A disk that fails in the middle of a training run: the error names place and remedy, and the run can continue."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from programs import output_of

from . import IMPORTS, failing_calls

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not failing_calls.is_possible(), reason="the calls of this CPU are not known")

BEGIN = (
    IMPORTS
    + """
import errno, gc, os
import torch, deepnvme, failing_calls, language_model

# The filter can tell the calls of threads apart.
with open("../threads.toml", "w") as file:
    file.write('[engine]\\nbackend = "threads"\\nworkers = 2\\n')
os.environ["DEEPNVME_CONFIG"] = os.path.abspath("../threads.toml")

torch.set_num_threads(1)
folder = os.getcwd()
STATE, PARAMETERS = 128 << 10, 256 << 10

def expect(call, number, *words):
    # Of reads and writes ahead, the error comes when what they were for is needed.
    try:
        for _ in range(5):
            call()
    except deepnvme.Error as error:
        print(error)
        assert error.errno == number, error
        # An unnamed swap file is named by its folder.
        assert error.filename == folder or error.filename.startswith(folder + "/"), error.filename
        for word in (*words, error.filename):
            assert word in str(error), (word, error)
        return
    raise SystemExit("nothing went wrong")

def steps(training, first, count):
    for step in range(first, first + count):
        training.step(step)

def made(**options):
    model = language_model.Model()
    optimizer = language_model.adamw(deepnvme.optim.AdamW, model, swap_dir=folder, memory=STATE, **options)
    return language_model.Training(model, optimizer, 20)

def assert_all_is_well(before):
    # The failed one goes; a new one works in the same folder, during its life and after it.
    descriptors = before
    failing_calls.occupy(descriptors)
    mine, his = made(), language_model.Model()
    theirs = language_model.Training(his, language_model.adamw(deepnvme.optim.AdamW, his), 20)
    for step in range(4):
        assert mine.step(step) == theirs.step(step)
    for ours, one in zip(mine.model.parameters(), his.parameters(), strict=True):
        assert torch.equal(ours, one)
"""
)

STEP = """
training = made()
swap_files = failing_calls.swap_files(folder)
steps(training, 0, 3 if {calls} != failing_calls.ALLOCATIONS else 0)
failing_calls.fail({calls}, swap_files, {number})
expect(lambda: training.step(3), {number}, {words!r})
if {calls} != failing_calls.ALLOCATIONS:
    assert training.optimizer.swap_stats().failures > 0
# It says so again, and does not hang.
expect(lambda: training.step(3), {number}, {words!r})
assert_all_is_well(swap_files)
del training
gc.collect()
assert_all_is_well(swap_files)
print("ended well")
"""

PARAMETERS = """
model = language_model.Model()
offloading = deepnvme.offload_parameters(model, memory=PARAMETERS, swap_dir=folder)
swap_files = failing_calls.swap_files(folder)
optimizer = language_model.adamw(deepnvme.optim.AdamW, model)
offloading.attach(optimizer)
training = language_model.Training(model, optimizer, 20)
steps(training, 0, 3)
failing_calls.fail({calls}, swap_files, {number})
expect(lambda: training.step(3), {number}, {words!r})
expect(lambda: training.step(3), {number}, {words!r})
assert_all_is_well(swap_files)
del model, offloading, optimizer, training
gc.collect()
assert_all_is_well(swap_files)
print("ended well")
"""


TROUBLE = [
    pytest.param("failing_calls.READS", errno.EIO, "dmesg", id="a read fails"),
    pytest.param("failing_calls.WRITES", errno.EIO, "dmesg", id="a write fails"),
    pytest.param("failing_calls.ALLOCATIONS", errno.ENOSPC, "free some space", id="no room for the first state"),
]


@pytest.mark.parametrize(("calls", "number", "words"), TROUBLE)
def test_state(folder: Path, calls: str, number: int, words: str) -> None:
    program = BEGIN + STEP.format(calls=calls, number=number, words=words)
    assert output_of(program, folder=folder).endswith("ended well\n")


@pytest.mark.parametrize(("calls", "number", "words"), TROUBLE[:2])
def test_parameters(folder: Path, calls: str, number: int, words: str) -> None:
    program = BEGIN + PARAMETERS.format(calls=calls, number=number, words=words)
    assert output_of(program, folder=folder).endswith("ended well\n")
