"""Saves, loads and checkpointers during close, Ctrl-C, fork and exit; the helpers are in `in_programs`."""

from .results import CLOSED, ENDS, FINISHED, FIRST, Cells

STATE = "state = {'a': torch.arange(24 << 20, dtype=torch.float32)}\n"
SMALL = "state = {'a': torch.arange(1 << 20, dtype=torch.float32)}\n"
CHECKPOINTER = "checkpointer = deepnvme.Checkpointer('run', durability='none')\n"
ASYNC = "checkpointer = deepnvme.Checkpointer('run', async_=True, durability='none')\n"
CLOSED_DURING_SAVE = "soon(checkpointer.close, busy())\nassert returns(lambda: checkpointer.save(1, state))\n"
CLOSED_IN_CHILD = """
checkpointer.save(1, state)
in_child(lambda: raises(errors.ClosedError, lambda: checkpointer.save(2, state)))
"""
SAVING = ASYNC + "moves = busy()\ncheckpointer.save(1, state)\n"
CLOSED_AFTER_SAVE = SAVING + "soon(checkpointer.close, moves)\n"

SAVE, LOAD = "`save`", "`load`"
CK_SAVE, CK_ASYNC = "`Checkpointer.save`", "the same with `async_=True`"
CK_WAIT, CK_CLOSE = "`Checkpointer.wait`, `wait_for_tensors`", "`Checkpointer.close`"
RESTORE, FETCH = "`Checkpointer.restore`", "`Checkpointer.fetch_parts`"
ROWS = (SAVE, LOAD, CK_SAVE, CK_ASYNC, CK_WAIT, CK_CLOSE, RESTORE, FETCH)

CELLS: Cells = {
    (SAVE, "close"): (
        "raises `ClosedError`; no file appears",
        STATE
        + """
ends_at_close(lambda: deepnvme.save(state, "file.pt"), deepnvme.default_engine().close)
assert os.listdir() == ["output"]
""",
    ),
    (SAVE, "Ctrl-C"): (
        "raises; no file appears",
        STATE
        + """
for name in ("file.pt", "file.safetensors"):
    event_times.clear()
    ends_at_interrupt(lambda: deepnvme.save(state, name))
    assert os.listdir() == ["output"]
""",
    ),
    (SAVE, "fork"): (
        "saves, with an engine of its own",
        SMALL
        + """
deepnvme.save(state, "file.pt")
in_child(lambda: deepnvme.save(state, "other.pt"))
assert deepnvme.load("other.pt")["a"].equal(state["a"])
engine = deepnvme.Engine()
in_child(lambda: raises(errors.ClosedError, lambda: deepnvme.save(state, "third.pt", engine=engine)))
""",
    ),
    (SAVE, "exit"): (
        "the process ends; the file is whole or absent",
        STATE + "leave(lambda: deepnvme.save(state, 'file.pt'), busy())",
    ),
    (LOAD, "close"): (
        "raises `ClosedError`, or finishes",
        STATE
        + """
deepnvme.save(state, "file.pt", durability="none", engine=deepnvme.Engine())
soon(deepnvme.default_engine().close, busy())
try:
    loaded = deepnvme.load("file.pt", engine=deepnvme.default_engine())
    while not event_times:
        time.sleep(0.001)
    assert loaded["a"].equal(state["a"])
except errors.ClosedError:
    check_time()
""",
    ),
    (LOAD, "Ctrl-C"): (
        "raises",
        STATE
        + """
deepnvme.save(state, "file.pt", durability="none", engine=deepnvme.Engine())
ends_at_interrupt(lambda: deepnvme.load("file.pt"))
event_times.clear()
ends_at_interrupt(lambda: deepnvme.load("file.pt", into=state))
""",
    ),
    (LOAD, "fork"): (
        "loads, with an engine of its own",
        SMALL
        + """
deepnvme.save(state, "file.pt")
def load():
    assert deepnvme.load("file.pt")["a"].equal(state["a"])
in_child(load)
""",
    ),
    (LOAD, "exit"): (
        ENDS,
        STATE
        + """
deepnvme.save(state, "file.pt", durability="none", engine=deepnvme.Engine())
leave(lambda: deepnvme.load("file.pt"), busy())
""",
    ),
    (CK_SAVE, "close"): (
        FINISHED,
        SMALL + CHECKPOINTER + CLOSED_DURING_SAVE + "assert checkpointer.latest().step == 1",
    ),
    (CK_SAVE, "Ctrl-C"): (
        "raises; there is no such checkpoint, unless it was complete already",
        STATE
        + CHECKPOINTER
        + """
checkpointer.save(1, {"a": torch.ones(3)})
ends_at_interrupt(lambda: checkpointer.save(2, state))
assert checkpointer.latest().step == 1
assert checkpointer.save(3, {"a": torch.ones(3)})
checkpointer.close()
assert [entry.step for entry in checkpointer.checkpoints] == [1, 3]
""",
    ),
    (CK_SAVE, "fork"): (
        CLOSED,
        SMALL + CHECKPOINTER + CLOSED_IN_CHILD + "assert checkpointer.save(3, state)",
    ),
    (CK_SAVE, "exit"): (
        "the process ends; the checkpoint is whole or absent",
        STATE + CHECKPOINTER + "leave(lambda: checkpointer.save(1, state), busy())",
    ),
    (CK_ASYNC, "close"): (
        FINISHED,
        SMALL
        + ASYNC
        + CLOSED_DURING_SAVE
        + """
checkpointer.wait()
assert checkpointer.latest().step == 1
""",
    ),
    (CK_ASYNC, "Ctrl-C"): (
        "raises; there is no such checkpoint, unless it was complete already",
        STATE
        + """
# Enough memory for part of the state: the rest waits for the disk.
checkpointer = deepnvme.Checkpointer("run", async_=True, durability="none", memory=32 << 20)
ends_at_interrupt(lambda: checkpointer.save(1, state))
checkpointer.wait()
assert checkpointer.latest() is None
assert checkpointer.save(3, {"a": torch.ones(3)})
checkpointer.close()
assert [entry.step for entry in checkpointer.checkpoints] == [3]
""",
    ),
    (CK_ASYNC, "fork"): (
        CLOSED,
        SMALL + ASYNC + CLOSED_IN_CHILD + "checkpointer.close()",
    ),
    (CK_ASYNC, "exit"): (
        "the process ends; the checkpoint is whole or absent",
        SMALL + ASYNC + "leave(lambda: checkpointer.save(1, state), busy())",
    ),
    (CK_WAIT, "close"): (
        FINISHED,
        SMALL
        + CLOSED_AFTER_SAVE
        + """
returns(checkpointer.wait)
assert checkpointer.latest().step == 1
with checkpointer.overlap():
    checkpointer.save(2, state)
    checkpointer.wait_for_tensors()
checkpointer.close()
""",
        SMALL
        + ASYNC
        + """
moves = busy()
with checkpointer.overlap():
    checkpointer.save(1, state)
    soon(checkpointer.close, moves)
    returns(checkpointer.wait_for_tensors)
while not checkpointer.checkpoints:
    time.sleep(0.001)
""",
    ),
    (CK_WAIT, "Ctrl-C"): (
        "raises; the save goes on",
        STATE
        + SAVING
        + """
ends_at_interrupt(checkpointer.wait, moves)
with checkpointer.overlap():
    event_times.clear()
    checkpointer.save(2, {"a": torch.ones(3)})
    checkpointer.wait()
    assert [entry.step for entry in checkpointer.checkpoints] == [1, 2]
    moves = busy()
    checkpointer.save(3, state)
    ends_at_interrupt(checkpointer.wait_for_tensors, moves)
    checkpointer.wait()
assert checkpointer.latest().step == 3
""",
    ),
    (CK_WAIT, "fork"): (
        CLOSED,
        SMALL
        + ASYNC
        + """
checkpointer.save(1, state)
in_child(lambda: [raises(errors.ClosedError, call) for call in (checkpointer.wait, checkpointer.wait_for_tensors)])
checkpointer.close()
""",
    ),
    (CK_WAIT, "exit"): (
        FIRST,
        SMALL + ASYNC + "checkpointer.save(1, state)\nleave(checkpointer.wait, at(0))",
        SMALL
        + ASYNC
        + """
with checkpointer.overlap():
    checkpointer.save(1, state)
    leave(checkpointer.wait_for_tensors, at(0))
""",
    ),
    (CK_CLOSE, "close"): (
        "the second call returns; the first finishes all",
        SMALL
        + CLOSED_AFTER_SAVE
        + """
returns(checkpointer.close)
assert checkpointer.latest().step == 1
""",
    ),
    (CK_CLOSE, "Ctrl-C"): (
        "raises; the save goes on",
        STATE
        + SAVING
        + """
ends_at_interrupt(checkpointer.close, moves)
checkpointer.close()
assert checkpointer.latest().step == 1
assert sorted(os.listdir("run")) == ["manifest.json", "step-00000001.pt"]
""",
    ),
    (CK_CLOSE, "fork"): (
        CLOSED,
        SMALL + ASYNC + "checkpointer.save(1, state)\nin_child(lambda: raises(errors.ClosedError, checkpointer.close))",
    ),
    (CK_CLOSE, "exit"): (FIRST, SMALL + ASYNC + "checkpointer.save(1, state)\nleave(checkpointer.close, at(0))"),
    (RESTORE, "close"): (
        FINISHED,
        SMALL
        + CHECKPOINTER
        + """
checkpointer.save(1, state)
soon(checkpointer.close, busy())
assert returns(checkpointer.restore)["a"].equal(state["a"])
""",
    ),
    (RESTORE, "Ctrl-C"): (
        "raises",
        STATE
        + """
engine = deepnvme.Engine()
with deepnvme.Checkpointer("run", durability="none", engine=engine) as checkpointer:
    checkpointer.save(1, state)
checkpointer = deepnvme.Checkpointer("run")
ends_at_interrupt(checkpointer.restore)
""",
    ),
    (RESTORE, "fork"): (
        "restores; raises `ClosedError` where the parent has saved",
        SMALL
        + CHECKPOINTER
        + """
checkpointer.save(1, state)
in_child(lambda: raises(errors.ClosedError, checkpointer.restore))
other = deepnvme.Checkpointer("run")
def restore():
    assert other.restore()["a"].equal(state["a"])
in_child(restore)
""",
    ),
    (RESTORE, "exit"): (
        ENDS,
        STATE
        + """
with deepnvme.Checkpointer("run", durability="none", engine=deepnvme.Engine()) as checkpointer:
    checkpointer.save(1, state)
leave(deepnvme.Checkpointer("run").restore, busy())
""",
    ),
    (FETCH, "fork"): (
        CLOSED,
        SMALL
        + CHECKPOINTER
        + """
checkpointer.save(1, state)
assert checkpointer.fetch_parts() == 0
in_child(lambda: raises(errors.ClosedError, checkpointer.fetch_parts))
""",
    ),
}
