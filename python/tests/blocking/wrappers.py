"""Calls of integrations that end as a row of the tables says, since they make the call of that row."""

from . import engine
from .frameworks import DEEPSPEED, LIGHTNING, SMALL, STATE, STUBS
from .handles import AIO
from .rows import TABLE

TRANSFORMERS = "import deepnvme.integrations.transformers as integration\n"
ENGINE = (
    DEEPSPEED
    + """
from deepnvme.integrations.deepspeed import DeepnvmeCheckpointEngine
saver = DeepnvmeCheckpointEngine(durability="none")
"""
)
WRITER = DEEPSPEED + "saver = WriterCheckpointEngine(config, None, False)\n"
PLUGIN = LIGHTNING + "plugin = DeepnvmeCheckpointIO(durability='none')\n"

# By name: the setup, and the call of `save` or `load`.
SAVES = {
    "lightning": (PLUGIN, "plugin.save_checkpoint(state, 'file')"),
    "deepspeed": (ENGINE, "saver.save(state, 'file')"),
    "deepspeed-writer": (WRITER, "saver.save(state, 'file')"),
    "transformers-weights": (TRANSFORMERS, "integration._save_tensors(state, 'file')"),
    "transformers-state": (TRANSFORMERS, "integration._save_object(state, 'file')"),
}
LOADS = {
    "lightning": (PLUGIN, "plugin.load_checkpoint('file')"),
    "deepspeed": (ENGINE, "saver.load('file')"),
    "transformers-weights": (TRANSFORMERS, "integration._load_tensors('file')"),
    "transformers-state": (TRANSFORMERS, "integration._load_object('file')"),
}
SAVED = "deepnvme.save(state, 'file', durability='none', engine=deepnvme.Engine())\n"

# Loaders of model servers, whose own method takes the files and calls what reads them.
SERVER = (
    STUBS
    + """
def safetensors_weights_iterator(files):
    raise AssertionError("the server's own function was called")
class DefaultModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config
    def _get_weights_iterator(self, files):
        return safetensors_weights_iterator(files)
config = types.SimpleNamespace(model_loader_extra_config=None, load_format="deepnvme")
"""
)
VLLM = """
stub("vllm", __version__="0")
for name in ("model_executor", "model_executor.model_loader"):
    stub(f"vllm.{name}")
stub("vllm.model_executor.model_loader.default_loader", DefaultModelLoader=DefaultModelLoader)
from deepnvme.integrations.vllm import loader_class
"""
SGLANG = """
stub("sglang", __version__="0")
for name in ("srt", "srt.configs", "srt.model_loader"):
    stub(f"sglang.{name}")
stub("sglang.srt.configs.load_config", LoadFormat=types.SimpleNamespace(SAFETENSORS="safetensors"))
stub("sglang.srt.model_loader.loader", DefaultModelLoader=DefaultModelLoader)
from deepnvme.integrations.sglang_loader import loader_class
"""
WEIGHTS = """
deepnvme.save(state, "file.safetensors", durability="none", engine=deepnvme.Engine())
weights = loader_class()(config)._get_weights_iterator(["file.safetensors"])
"""

GDS = engine.SETUP + AIO + "from deepnvme.deepspeed import gds_handle\nhandle = gds_handle(4096, 1, False, False, 1)\n"
PIN = "from deepnvme.deepspeed import aio_handle, pin_handle\nexample = torch.empty(0, dtype=torch.uint8)\n"


def _of_save(setup: str, call: str) -> dict[str, str]:
    return {
        "close": STATE
        + setup
        + f"""
ends_at_close(lambda: {call}, deepnvme.default_engine().close)
assert os.listdir() == ["output"]
""",
        "Ctrl-C": STATE + setup + f"ends_at_interrupt(lambda: {call})\nassert os.listdir() == ['output']\n",
        "fork": SMALL
        + setup
        + f"""
deepnvme.save(state, "other", durability="none")
in_child(lambda: {call})
assert deepnvme.load("file")["a"].equal(state["a"])
""",
        "exit": STATE + setup + f"leave(lambda: {call}, busy())",
    }


def _of_load(setup: str, call: str) -> dict[str, str]:
    saved = SAVED
    if "tensors" in call:
        saved = saved.replace("'file'", "'file.safetensors'") + "os.rename('file.safetensors', 'file')\n"
    return {
        "close": STATE
        + saved
        + setup
        + f"""
soon(deepnvme.default_engine().close, busy())
try:
    assert {call}["a"].equal(state["a"])
except errors.ClosedError:
    check_time()
""",
        "Ctrl-C": STATE + saved + setup + f"ends_at_interrupt(lambda: {call})\n",
        "fork": SMALL
        + saved
        + setup
        + f"""
def load():
    assert {call}["a"].equal(state["a"])
load()
in_child(load)
""",
        "exit": STATE + saved + setup + f"leave(lambda: {call}, busy())",
    }


def _of_weights(server: str) -> dict[str, str]:
    return {
        "close": STATE
        + SERVER
        + server
        + WEIGHTS
        + """
soon(deepnvme.default_engine().close, busy())
try:
    assert dict(weights)["a"].equal(state["a"])
except errors.ClosedError:
    check_time()
""",
        "Ctrl-C": STATE
        + SERVER
        + server
        + WEIGHTS
        + "ends_at_interrupt(lambda: list(weights))\nassert not list(weights)\n",
        "fork": SMALL
        + SERVER
        + server
        + WEIGHTS
        + "in_child(lambda: raises(errors.ClosedError, lambda: next(weights)))\nassert next(weights)[0] == 'a'\n",
        "exit": STATE + SERVER + server + WEIGHTS + "leave(lambda: list(weights), busy())",
    }


EMBEDDING = TABLE.replace("4096), dtype=torch.uint8", "1024), dtype=torch.float32") + (
    """
from deepnvme.nn import DiskEmbedding
embedding = DiskEmbedding(table)
def embed(rows):
    return embedding(torch.arange(0, 2 * rows, 2))
"""
)

# By name and event.
PROGRAMS = {
    (name, event): program
    for name, programs in (
        *((f"save of {name}", _of_save(*parts)) for name, parts in SAVES.items()),
        *((f"load of {name}", _of_load(*parts)) for name, parts in LOADS.items()),
        *((f"weights of {name}", _of_weights(server)) for name, server in (("vllm", VLLM), ("sglang", SGLANG))),
    )
    for event, program in programs.items()
} | {
    ("DiskEmbedding", "close"): EMBEDDING
    + "soon(table.close, moves)\nassert len(returns(lambda: embed(SOME))) == SOME",
    ("DiskEmbedding", "Ctrl-C"): EMBEDDING
    + "ends_at_interrupt(lambda: embed(ALL), moves)\nassert embed(1).eq(0).all()",
    ("DiskEmbedding", "fork"): EMBEDDING + "in_child(lambda: raises(errors.ClosedError, lambda: embed(1)))",
    ("DiskEmbedding", "exit"): EMBEDDING + "leave(lambda: embed(ALL), moves)",
    ("gds_handle.wait", "Ctrl-C"): GDS
    + "handle.async_pwrite(tensor, 'aio')\nends_at_interrupt(handle.wait, started)\n",
    ("gds_handle.wait", "fork"): GDS
    + "handle.async_pwrite(tensor[:PART], 'aio')\nin_child(lambda: raises(RuntimeError, handle.wait))\nhandle.wait()\n",
    **{
        (f"{handle}.new_cpu_locked_tensor", "Ctrl-C"): PIN
        + f"""
ends_at_interrupt(lambda: [{handle}().new_cpu_locked_tensor(3 << 30, example) for _ in range(100)], at(0.05))
"""
        for handle in ("aio_handle", "pin_handle")
    },
}
