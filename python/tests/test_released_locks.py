"""While a call waits for the disk, other threads run Python, and use the same objects: no call holds a lock meanwhile.

Each call stops at its first transfer until another thread has answered, which would never happen otherwise.
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from call_filter import IMPOSSIBLE

Run = Callable[..., Any]

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are those of x86-64"
)

SETTINGS = '[engine]\nbackend = "threads"\nworkers = 1\nblock_bytes = 65536\n'
# More than one transfer, and more than a caller's own thread makes.
SETUP = f"""
import asyncio, contextlib, signal, sys
sys.path.insert(0, {str(Path(__file__).parent / "shared")!r})
import held_calls, os, torch, deepnvme
import deepnvme._checkpoint.checkpointer, deepnvme._offload, deepnvme._stream, deepnvme.deepspeed
from deepnvme import errors
from deepnvme.integrations.weights import iterate_weights
from torch import nn
torch.set_num_threads(1)
signal.alarm(30)
SIZE = 1 << 20
data = torch.arange(SIZE // 4, dtype=torch.float32)
probe = lambda: None
"""

ENGINE = """
engine = deepnvme.Engine(backend="threads", workers=1, block_bytes=65536)
engine.write(data, "file")
stripes = deepnvme.StripeSet(["part-0", "part-1"])
engine.write(data, stripes)
def probe():
    # The call may be the end of the engine.
    with contextlib.suppress(errors.ClosedError):
        engine.stats()
        engine.start_read(bytearray(1), "file").cancel()
"""
SWAPPER = """
swapper = deepnvme.Swapper(".", memory=5 << 20)
deepnvme.write(data, "file")
descriptor = os.open("file", os.O_RDWR)
in_memory = os.memfd_create("target")
os.truncate(in_memory, SIZE)
for key in "abcdefgh":
    swapper.put(key, data)
swapper.flush()
# Those that were put first are on disk. This one stays in memory.
kept = swapper.borrow("h", shared=True)
kept.__enter__()
swapper.attach("attached", "file", 0, SIZE)
def create(key):
    swapper.create(key, [SIZE], torch.uint8).__enter__()
def probe():
    # A call that replaces items may have taken one away.
    assert len(swapper) + ("a" in swapper) > 0
    assert swapper.stats().items > 0
    swapper.prefetch([])
    with swapper.borrow("h", shared=True):
        pass
"""
CHECKED = SWAPPER.replace("memory=5 << 20", "memory=5 << 20, checksums=True")
SAVED = """
state = {"a": data, "b": data + 1}
deepnvme.save(state, "file.pt")
deepnvme.save(state, "file.safetensors")
"""
CHECKPOINTER = """
state = {"a": data, "b": data + 1}
checkpointer = deepnvme.Checkpointer("run", async_=True)
checkpointer.save(1, state)
checkpointer.wait()
def probe():
    assert checkpointer.latest().step >= 1
    checkpointer.stats()
"""
DCP = """
import torch.distributed.checkpoint as dcp
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
state = {"a": data}
dcp.save(state, storage_writer=DeepnvmeWriter("run"), no_dist=True)
"""
OPTIMIZER = """
from deepnvme import optim
params = [nn.Parameter(torch.ones(1 << 18)) for _ in range(8)]
optimizer = optim.AdamW(params, swap_dir=".", memory="4MiB", swap_gradients={})
def backward():
    sum(param.square().sum() for param in params).backward()
for _ in range(2):
    optimizer.zero_grad()
    backward()
    optimizer.step()
backward()
saved = optimizer.state_dict()
optimizer.save_state("state")
probe = optimizer.swap_stats
"""
GRADIENTS_IN_MEMORY, GRADIENTS_ON_DISK = OPTIMIZER.format(False), OPTIMIZER.format(True)
MODEL = """
model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
x = torch.ones(1, 512)
"""
OFFLOADED = (
    MODEL
    + """
offloading = deepnvme.offload_parameters(model, memory="4MiB", swap_dir=".")
model(x).sum().backward()
state = model.state_dict()
def gather():
    with offloading.gathered([model[0].weight]):
        pass
probe = offloading.stats
"""
)
STREAMED = (
    MODEL
    + """
deepnvme.save(model.state_dict(), "model.safetensors")
def stream(memory="3MiB"):
    return deepnvme.stream(model, weights="model.safetensors", memory=memory)
def run():
    stream()
    def probing():
        model.streaming.stats()
    def call():
        with torch.no_grad():
            model(x)
    held.during(call, probing)
"""
)
HANDLE = """
from deepnvme.deepspeed import aio_handle, aio_read, aio_write
handle = aio_handle(65536, 4, False, False, 1)
handle.sync_pwrite(data, "file")
def probe():
    assert handle.get_block_size() == 65536
def wait():
    handle.async_pread(data, "file")
    handle.wait()
HANDLE_SETTINGS = (65536, 4, False, False)
"""

CALLS = {
    # They read the file of settings.
    "": ("deepnvme.default_engine()", "deepnvme.Engine.from_file(os.environ['DEEPNVME_CONFIG'])"),
    ENGINE: (
        "engine.read(data, 'file')",
        "engine.read(data[:100], 'file')",
        "engine.write(data, 'file')",
        "engine.write(data[:100], 'file', durability='full')",
        "engine.read_batch([('file', 0, data)])",
        "engine.write_batch([('file', 0, data)])",
        "engine.read(data, stripes)",
        "engine.write(data, stripes)",
        "engine.start_read(data, 'file').result()",
        "asyncio.run(awaiting(engine.start_read(data, 'file')))",
        "engine.start_write(data, 'file').__exit__(None, None, None)",
        "[engine.start_write(data, 'file'), engine.close()]",
        "deepnvme.open('file', engine=engine).read()",
        "deepnvme.open('file', engine=engine).readinto(bytearray(SIZE))",
        "deepnvme.open('new', 'wb', engine=engine).write(bytes(SIZE * 32))",
        "write_and_close()",
    ),
    SWAPPER: (
        "swapper.read('a', 0, torch.empty(SIZE // 4))",
        "swapper.read('attached', 0, torch.empty(SIZE // 4))",
        "swapper.write('a', 0, data)",
        "swapper.borrow('a').__enter__()",
        "swapper.borrow('attached', shared=True).__enter__()",
        "[swapper.put(key, data) for key in 'abcdefg']",
        "[swapper.put('f', data), swapper.put('g', data), *map(create, 'abc')]",
        "[swapper.put('g', data), swapper.flush()]",
        "[swapper.put('g', data), swapper.extents('g')]",
        "swapper.export('a', descriptor)",
        "swapper.export('a', in_memory)",
        "swapper.import_('a', descriptor, 0, SIZE)",
        "swapper.import_('a', in_memory, 0, SIZE)",
    ),
    CHECKED: (
        "swapper.import_('a', descriptor, 0, SIZE)",
        "swapper.read('a', 0, torch.empty(10))",
    ),
    SAVED: (
        "deepnvme.save(state, 'new.pt')",
        "deepnvme.save(state, 'new.safetensors')",
        "deepnvme.load('file.pt')",
        "deepnvme.load('file.safetensors', verify='full')",
        "deepnvme.load('file.safetensors', into=state)",
        "deepnvme.load('file.safetensors', lazy=True)['a'] + 1",
        "dict(iterate_weights('file.safetensors'))",
        "deepnvme.verify('file.safetensors')",
        "deepnvme.inspect('file.safetensors')",
        "deepnvme.convert('file.safetensors', 'new.pt')",
        "deepnvme.pack('file.safetensors', 'new', dtype='int8')",
        "deepnvme.report('.')",
        "deepnvme.bench('read', '.', size='4M', backend='threads', loops=1)",
        "deepnvme.tune('.', budget=1, size='1M')",
    ),
    CHECKPOINTER: (
        "[checkpointer.save(2, state), checkpointer.wait()]",
        "[checkpointer.save(2, state), checkpointer.close()]",
        "checkpointer.restore()",
        # This drops it as well, which removes its lock.
        "deepnvme.Checkpointer('other').save(1, state)",
    ),
    DCP: (
        "dcp.save(state, storage_writer=DeepnvmeWriter('other'), no_dist=True)",
        "dcp.load(state, storage_reader=DeepnvmeReader('run'), no_dist=True)",
    ),
    GRADIENTS_IN_MEMORY: (
        "optimizer.step()",
        "optimizer.state_dict()",
        "optimizer.load_state_dict(saved)",
        "optimizer.save_state('new')",
        "optimizer.load_state('state')",
    ),
    GRADIENTS_ON_DISK: ("backward()", "optimizer.step()"),
    MODEL: ("deepnvme.offload_parameters(model, memory='4MiB', swap_dir='.')",),
    OFFLOADED: (
        "model(x)",
        "model(x).sum().backward()",
        "gather()",
        "model.state_dict()",
        "offloading.save('new.safetensors')",
        "offloading.load_state_dict(state)",
        "offloading.close()",
    ),
    STREAMED: ("stream('64MiB')", "run()"),
    HANDLE: (
        "handle.sync_pread(data, 'file')",
        "handle.sync_pwrite(data, 'file')",
        "handle.read(data, 'file', True)",
        "handle.write(data, 'file', True)",
        "wait()",
        "aio_read(data, 'file', *HANDLE_SETTINGS, False)",
        "aio_write(data, 'file', *HANDLE_SETTINGS, False)",
    ),
}
MORE = """
held = held_calls.HeldCalls()
async def awaiting(pending):
    return await pending
def write_and_close():
    with deepnvme.open("new", "wb", engine=engine) as file:
        file.write(bytes(SIZE))
"""


@pytest.mark.parametrize(
    ("setup", "call"), [pytest.param(setup, call, id=call) for setup, calls in CALLS.items() for call in calls]
)
def test_other_threads_go_on_meanwhile(python_fork: Run, tmp_path: Path, setup: str, call: str) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS)
    made = call if call == "run()" else f"held.during(lambda: {call}, probe)"
    run(python_fork, f"{SETUP}{setup}{MORE}\n{made}\nos._exit(0)", DEEPNVME_CONFIG=str(settings))


def test_a_call_that_holds_the_gil_would_hang(python_fork: Run) -> None:
    program = """
import ctypes
held = held_calls.HeldCalls()
with open("file", "wb") as file:
    signal.alarm(2)
    held.during(lambda: ctypes.PyDLL(None).pwrite(file.fileno(), b"a", 1, 0), probe)
"""
    run(python_fork, SETUP + program, status=-signal.SIGALRM)


def run(python_fork: Run, program: str, status: int = 0, **environment: str) -> None:
    try:
        python_fork(program, status=status, environment=environment)
    except AssertionError as error:
        if str(error).startswith(f"status {IMPOSSIBLE}:"):
            pytest.skip("this kernel takes no filter that holds calls")
        raise
