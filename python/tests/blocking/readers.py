"""Lazy tensors, iterators and torch.distributed.checkpoint during close, Ctrl-C, fork and exit."""

from .results import CLOSED, CLOSED_OR_FINISHED, ENDS, Cells

SAVED = """
state = {'a': torch.arange(24 << 20, dtype=torch.float32)}
deepnvme.save(state, "file.safetensors", durability="none", engine=deepnvme.Engine())
"""
SMALL = """
state = {'a': torch.arange(1 << 20, dtype=torch.float32)}
deepnvme.save(state, "file.safetensors", durability="none")
"""
LAZY_STATE = SAVED + "lazy = deepnvme.load('file.safetensors', lazy=True)['a']\n"
ITERATE = """
from deepnvme.integrations.weights import iterate_weights
state = {name: torch.arange(12 << 20, dtype=torch.float32) for name in "ab"}
deepnvme.save(state, "file.safetensors", durability="none", engine=deepnvme.Engine())
"""
DCP = """
import logging
import torch.distributed.checkpoint as dcp
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
state = {'a': torch.arange(24 << 20, dtype=torch.float32)}
target = {'a': torch.zeros(24 << 20)}
from torch.distributed.checkpoint import CheckpointException
def fails_with(error, call):
    "Require torch's exception, which lists the error of each rank."
    def run():
        try:
            call()
        except CheckpointException as failed:
            assert isinstance(failed.failures[0][0], error), failed
            raise
    raises(CheckpointException, run)
def save():
    dcp.save(state, storage_writer=DeepnvmeWriter("run", durability="none"), no_dist=True)
def load():
    dcp.load(target, storage_reader=DeepnvmeReader("run"), no_dist=True)
"""
DCP_SAVED = (
    DCP
    + """
writer = DeepnvmeWriter("run", durability="none", engine=deepnvme.Engine())
dcp.save(state, storage_writer=writer, no_dist=True)
"""
)

LAZY, ITERATOR = "the first use of a tensor of `load`, with `lazy=True`", "`iterate_weights`"
DCP_SAVE, DCP_LOAD = "`dcp.save` with `DeepnvmeWriter`", "`dcp.load` with `DeepnvmeReader`"
ROWS = (LAZY, ITERATOR, DCP_SAVE, DCP_LOAD)


CELLS: Cells = {
    (LAZY, "close"): (
        CLOSED_OR_FINISHED,
        LAZY_STATE
        + """
other = deepnvme.load("file.safetensors", lazy=True)["a"]
soon(deepnvme.default_engine().close, busy())
try:
    assert (lazy + 1)[1] == 2
    while not event_times:
        time.sleep(0.001)
except errors.ClosedError:
    check_time()
event_times.clear()
raises(errors.ClosedError, lambda: other + 1)
""",
    ),
    (LAZY, "Ctrl-C"): (
        "raises; the next use reads it again",
        LAZY_STATE
        + """
ends_at_interrupt(lambda: lazy + 1)
assert "read=False" in repr(lazy)
assert lazy.equal(state["a"])
""",
    ),
    (LAZY, "fork"): (
        CLOSED,
        SMALL
        + """
lazy = deepnvme.load("file.safetensors", lazy=True)["a"]
read = deepnvme.load("file.safetensors", lazy=True)["a"].materialize()
def use():
    raises(errors.ClosedError, lambda: lazy + 1)
    assert deepnvme.load("file.safetensors", lazy=True)["a"][1] == read[1] == 1
in_child(use)
assert lazy[1] == 1
""",
    ),
    (LAZY, "exit"): (ENDS, LAZY_STATE + "leave(lambda: lazy + 1, busy())"),
    (ITERATOR, "close"): (
        CLOSED_OR_FINISHED,
        ITERATE
        + """
soon(deepnvme.default_engine().close, busy())
try:
    found = dict(iterate_weights("file.safetensors"))
    assert all(found[name].equal(state[name]) for name in "ab")
except errors.ClosedError:
    check_time()
""",
    ),
    (ITERATOR, "Ctrl-C"): (
        "raises; iterate again from the beginning",
        ITERATE
        + """
weights = iterate_weights("file.safetensors")
ends_at_interrupt(lambda: list(weights))
assert not list(weights)
""",
    ),
    (ITERATOR, "fork"): (
        CLOSED,
        SMALL
        + """
from deepnvme.integrations.weights import iterate_weights
weights = iterate_weights("file.safetensors")
def iterate():
    raises(errors.ClosedError, lambda: next(weights))
    assert next(iterate_weights("file.safetensors"))[0] == "a"
in_child(iterate)
assert next(weights)[0] == "a"
""",
    ),
    (ITERATOR, "exit"): (ENDS, ITERATE + "leave(lambda: list(iterate_weights('file.safetensors')), busy())"),
    (DCP_SAVE, "close"): (
        "raises torch's `CheckpointException`; no checkpoint appears",
        DCP
        + """
soon(deepnvme.default_engine().close, busy())
fails_with(errors.ClosedError, save)
assert not os.listdir("run")
""",
    ),
    (DCP_SAVE, "Ctrl-C"): (
        "raises torch's `CheckpointException`; no checkpoint appears",
        DCP
        + """
soon(interrupt, busy())
fails_with(KeyboardInterrupt, save)
assert not os.listdir("run")
""",
    ),
    (DCP_SAVE, "fork"): (
        "saves, with an engine of its own",
        DCP
        + """
state["a"] = target["a"] = state["a"][: 1 << 20].clone()
save()
state["a"] += 1
in_child(save)
load()
assert target["a"][1] == 2
""",
    ),
    (DCP_SAVE, "exit"): (
        "the process ends; the checkpoint is whole or absent",
        DCP + "leave(save, busy())",
    ),
    (DCP_LOAD, "close"): (
        "raises torch's `CheckpointException`, or finishes",
        DCP_SAVED
        + """
soon(deepnvme.default_engine().close, busy())
try:
    load()
except CheckpointException as failed:
    assert isinstance(failed.failures[0][0], errors.ClosedError), failed
    check_time()
else:
    assert target["a"].equal(state["a"])
""",
    ),
    (DCP_LOAD, "Ctrl-C"): (
        "raises torch's `CheckpointException`",
        DCP_SAVED + "soon(interrupt, busy())\nfails_with(KeyboardInterrupt, load)",
    ),
    (DCP_LOAD, "fork"): (
        "loads, with an engine of its own",
        DCP
        + """
state["a"], target["a"] = (tensor[: 1 << 20].clone() for tensor in (state["a"], target["a"]))
save()
def check():
    load()
    assert target["a"].equal(state["a"])
in_child(check)
""",
    ),
    (DCP_LOAD, "exit"): (ENDS, DCP_SAVED + "leave(load, busy())"),
}
