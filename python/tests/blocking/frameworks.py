"""Checkpoints of training frameworks during close, Ctrl-C, fork and exit. Stubs stand for the frameworks."""

from .results import CLOSED, CLOSED_OR_FINISHED, ENDS, FIRST, Cells

# Modules with as much as the integrations use, whether or not the frameworks are installed.
STUBS = """
import types
from importlib.machinery import ModuleSpec
def stub(name, **names):
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(names)
    return module
"""
STATE = "state = {'a': torch.arange(24 << 20, dtype=torch.float32)}\n"
SMALL = "state = {'a': torch.arange(1 << 20, dtype=torch.float32)}\n"
LIGHTNING = (
    STUBS
    + """
for name in ("lightning", "lightning.fabric"):
    stub(name)
stub("lightning.fabric.plugins", CheckpointIO=object)
sys.modules["lightning_fabric"] = None
from deepnvme.integrations.lightning import DeepnvmeCheckpointIO
"""
)
PLUGIN = LIGHTNING + "plugin = DeepnvmeCheckpointIO(async_=True, durability='none')\n"
# Enough memory for part of the state: the rest waits for the disk.
TIGHT = LIGHTNING + "plugin = DeepnvmeCheckpointIO(async_=True, durability='none', memory=32 << 20)\n"
DEEPSPEED = (
    STUBS
    + """
comm = stub("deepspeed.comm", barrier=lambda: None, get_rank=lambda: 0)
stub("deepspeed", comm=comm)
stub("deepspeed.io", MockFileWriter=None)
class CheckpointEngine:
    def __init__(self, config_params=None):
        pass
stub("deepspeed.runtime.checkpoint_engine.checkpoint_engine", CheckpointEngine=CheckpointEngine)
for name in ("runtime.zero.config", "utils.tensor_fragment", "runtime.fp16.loss_scaler"):
    stub(f"deepspeed.{name}")
from deepnvme.integrations._deepspeed_writers import DecoupledCheckpointEngine, WriterCheckpointEngine
config = types.SimpleNamespace(checkpoint_config={"writer": {"type": "FAST", "show_statistics": False}})
info = types.SimpleNamespace(tag="one", save_latest=True, save_dir=".")
"""
)
DECOUPLED = DEEPSPEED + "saver = DecoupledCheckpointEngine(config, None, False)\nsaver.create(info)\n"

SAVE = "`DeepnvmeCheckpointIO.save_checkpoint` with `async_=True`, and `save` of a DeepSpeed engine with `decoupled`"
WAIT = "`teardown` and `load_checkpoint` of such a plugin; `commit`, `load` and `cleanup` of such an engine"
READ = "reading a tensor in `from_pretrained`, inside `transformers.enabled()`"
ROWS = (SAVE, WAIT, READ)

TENSOR = """
from deepnvme.integrations._safetensors import TensorFile
state = {"a": torch.arange(24 << 20, dtype=torch.float32).view(-1, 1024)}
deepnvme.save(state, "file.safetensors", durability="none", engine=deepnvme.Engine())
file = TensorFile("file.safetensors")
"""
# Of all of a tensor, and of some rows.
READS = ("file.get_tensor('a')", "file.get_slice('a')[:-1]")

PLUGIN_SAVING = PLUGIN + "moves = busy()\nplugin.save_checkpoint(state, 'file')\n"
ENGINE_SAVING = DECOUPLED + "moves = busy()\nsaver.save(state, 'file')\n"

CELLS: Cells = {
    (SAVE, "close"): (
        "raises `ClosedError`, or the next call does, or finishes",
        *(
            SMALL
            + code
            + f"""
soon(deepnvme.default_engine().close, busy())
def save():
    {save}
    {wait}
try:
    returns(save)
    assert sorted(os.listdir()) == ["file", "output"]
except errors.ClosedError:
    check_time()
    assert os.listdir() == ["output"]
"""
            for code, save, wait in (
                (TIGHT, "plugin.save_checkpoint(state, 'file')", "plugin.teardown()"),
                (DECOUPLED, "saver.save(state, 'file')", "saver.commit(info)"),
            )
        ),
    ),
    (SAVE, "Ctrl-C"): (
        "raises; no file appears, unless it was complete already",
        STATE
        + TIGHT
        + """
plugin.save_checkpoint({"a": 1}, "old")
plugin.teardown()
ends_at_interrupt(lambda: plugin.save_checkpoint(state, "file"))
assert sorted(os.listdir()) == ["old", "output"]
# No save is running.
plugin.remove_checkpoint("old")
assert os.listdir() == ["output"]
plugin.save_checkpoint({"a": 2}, "next")
plugin.teardown()
assert plugin.load_checkpoint("next") == {"a": 2}
""",
        STATE
        + DECOUPLED
        + """
saver._files._memory = 32 << 20
ends_at_interrupt(lambda: saver.save(state, "file"))
assert os.listdir() == ["output"]
# A checkpoint that lacks a file is not committed.
assert saver.get_commit_info() is None
saver.create(info)
saver.save({"a": 2}, "next")
assert saver.commit(info)
saver.cleanup()
""",
    ),
    (SAVE, "fork"): (
        "raises `ClosedError` while the parent saves, or saves, with an engine of its own",
        SMALL
        + PLUGIN_SAVING
        + """
calls = (lambda: plugin.save_checkpoint(state, "other"), lambda: plugin.remove_checkpoint("other"))
in_child(lambda: [raises(errors.ClosedError, call) for call in calls])
plugin.teardown()
plugin.save_checkpoint(state, "file")
plugin.load_checkpoint("file")
state["a"] += 1
def save():
    plugin.save_checkpoint(state, "other")
    plugin.remove_checkpoint("file")
    plugin.teardown()
in_child(save)
assert sorted(os.listdir()) == ["other", "output"]
assert plugin.load_checkpoint("other")["a"].equal(state["a"])
""",
        SMALL
        + ENGINE_SAVING
        + """
in_child(lambda: raises(errors.ClosedError, lambda: saver.save(state, "other")))
saver.commit(info)
def save():
    saver.create(info)
    saver.save(state, "other")
    saver.cleanup()
in_child(save)
assert saver.load("other")["a"].equal(state["a"])
""",
    ),
    (SAVE, "exit"): (
        "the process ends; the file is whole or absent",
        SMALL + PLUGIN + "leave(lambda: plugin.save_checkpoint(state, 'file'), busy())",
        SMALL + DECOUPLED + "leave(lambda: saver.save(state, 'file'), busy())",
    ),
    (WAIT, "close"): (
        CLOSED_OR_FINISHED,
        *(
            SMALL
            + code
            + f"""
soon(deepnvme.default_engine().close, moves)
try:
    returns(lambda: {wait})
    assert "file" in os.listdir()
except errors.ClosedError:
    check_time()
    assert os.listdir() == ["output"]
"""
            for code, wait in (
                (PLUGIN_SAVING, "plugin.teardown()"),
                (ENGINE_SAVING, "saver.commit(info)"),
                (ENGINE_SAVING, "saver.cleanup()"),
            )
        ),
    ),
    (WAIT, "Ctrl-C"): (
        "raises; the save goes on: call it again",
        STATE
        + PLUGIN
        + """
for name in ("one", "two"):
    plugin.save_checkpoint({"a": 1}, name)
moves = busy()
plugin.save_checkpoint(state, "file")
plugin.remove_checkpoint("one")
ends_at_interrupt(lambda: plugin.load_checkpoint("file"), moves)
event_times.clear()
ends_at_interrupt(plugin.teardown, at(0))
plugin.remove_checkpoint("two")
# Old checkpoints stay until the new one is there.
assert "file" not in os.listdir() and {"one", "two"} <= set(os.listdir())
plugin.teardown()
assert sorted(os.listdir()) == ["file", "output"]
""",
        STATE
        + ENGINE_SAVING
        + """
ends_at_interrupt(lambda: saver.commit(info), moves)
assert saver.get_commit_info() is info
for call in (lambda: saver.load("file"), saver.cleanup):
    event_times.clear()
    ends_at_interrupt(call, at(0))
assert "file" not in os.listdir()
saver.cleanup()
assert sorted(os.listdir()) == ["file", "latest", "output"]
""",
    ),
    (WAIT, "fork"): (
        "raises `ClosedError` while the parent saves",
        SMALL
        + PLUGIN_SAVING
        + """
calls = (plugin.teardown, lambda: plugin.load_checkpoint("file"))
in_child(lambda: [raises(errors.ClosedError, call) for call in calls])
plugin.teardown()
assert plugin.load_checkpoint("file")["a"].equal(state["a"])
""",
        SMALL
        + ENGINE_SAVING
        + """
calls = (lambda: saver.commit(info), lambda: saver.load("file"), saver.cleanup)
in_child(lambda: [raises(errors.ClosedError, call) for call in calls])
assert saver.commit(info)
""",
    ),
    (WAIT, "exit"): (
        FIRST,
        SMALL + PLUGIN_SAVING + "leave(plugin.teardown, at(0))",
        SMALL + ENGINE_SAVING + "leave(lambda: saver.commit(info), at(0))",
    ),
    (READ, "close"): (
        CLOSED_OR_FINISHED,
        *(
            # A read that is finished has to end in time.
            TENSOR.replace("24 <<", "2 <<")
            + f"""
soon(deepnvme.default_engine().close, busy())
try:
    found = {read}
    assert found.equal(state["a"][: len(found)])
except errors.ClosedError:
    check_time()
event_times.clear()
deepnvme.default_engine().close()
raises(errors.ClosedError, lambda: {read})
"""
            for read in READS
        ),
    ),
    (READ, "Ctrl-C"): (
        "raises; read it again",
        *(
            TENSOR
            + f"""
ends_at_interrupt(lambda: {read})
assert file.get_slice("a")[3:5].equal(state["a"][3:5])
"""
            for read in READS
        ),
    ),
    (READ, "fork"): (
        CLOSED,
        TENSOR
        + f"""
in_child(lambda: [raises(errors.ClosedError, call) for call in (lambda: {READS[0]}, lambda: {READS[1]})])
def read():
    assert TensorFile("file.safetensors").get_slice("a")[3:5].equal(state["a"][3:5])
in_child(read)
""",
    ),
    (READ, "exit"): (ENDS, *(TENSOR + f"leave(lambda: {read}, busy())" for read in READS)),
}
