"""The offloader of SGLang's layers during close, Ctrl-C, fork and exit. It runs without SGLang."""

from .results import CLOSED, ENDS, Cells

LAYERS = """
import contextlib, copy
from deepnvme.integrations._sglang.offloader import Offloader
torch.manual_seed(1)
stock = [nn.Linear(1024, 1024, bias=False) for _ in range(8)]
x = torch.ones(1, 1024)
def compute(layers):
    found = x
    with torch.no_grad():
        for layer in layers:
            found = torch.tanh(layer(found))
    return found
wanted = compute(stock)
offloader = Offloader(".", memory=9 << 20)
layers = offloader.wrap_modules(iter(copy.deepcopy(stock)))
"""
STREAMED = (
    LAYERS
    + """
offloader.post_init()
def run():
    while True:
        compute(layers)
"""
)
# Weights that loading has replaced are written to the file again.
REPLACED = (
    LAYERS
    + """
for layer in layers:
    layer.weight = nn.Parameter(layer.weight.data.clone())
"""
)
# The sync is one call of the kernel, which no signal ends.
SYNCING = (
    LAYERS
    + """
import ctypes
mutex = ctypes.create_string_buffer(256)
timedlock = ctypes.CDLL(None).pthread_mutex_timedlock
assert ctypes.CDLL(None).pthread_mutex_lock(mutex) == 0
is_syncing = threading.Event()
def fdatasync(descriptor):
    is_syncing.set()
    timedlock(mutex, (ctypes.c_long * 2)(int(time.time()) + 5, 0))
sync, os.fdatasync = os.fdatasync, fdatasync
"""
)

START, FORWARD = "`post_init` of SGLang's offloader", "`forward` of a layer of SGLang's offloader"
CLOSE = "`close` of SGLang's offloader"
ROWS = (START, FORWARD, CLOSE)

CELLS: Cells = {
    (START, "close"): (
        CLOSED,
        REPLACED + "soon(offloader.close, busy())\nraises(errors.ClosedError, offloader.post_init)\n",
        SYNCING + "soon(offloader.close, is_syncing.is_set)\nraises(errors.ClosedError, offloader.post_init)\n",
    ),
    (START, "Ctrl-C"): (
        "raises; the next call goes on with it",
        *(
            code
            + f"""
ends_at_interrupt(offloader.post_init, {moment})
os.fdatasync = sync
offloader.post_init()
assert compute(layers).equal(wanted)
"""
            for code, moment in (("sync = os.fdatasync\n" + REPLACED, "busy()"), (SYNCING, "is_syncing.is_set"))
        ),
    ),
    (START, "fork"): (
        CLOSED,
        REPLACED
        + """
in_child(lambda: [raises(errors.ClosedError, call) for call in (offloader.post_init, lambda: compute(layers))])
offloader.post_init()
assert compute(layers).equal(wanted)
""",
    ),
    (START, "exit"): (
        ENDS,
        REPLACED + "leave(offloader.post_init, busy())",
    ),
    (FORWARD, "close"): (
        CLOSED,
        STREAMED
        + """
ends_at_close(run, offloader.close)
event_times.clear()
raises(errors.ClosedError, run)
""",
    ),
    (FORWARD, "Ctrl-C"): (
        "raises; the model can be used further",
        STREAMED
        + """
for _ in range(10):
    event_times.clear()
    ends_at_interrupt(run, busy(1 << 20))
    assert all(layer.weight.is_meta for layer in layers)
assert compute(layers).equal(wanted)
""",
    ),
    (FORWARD, "fork"): (
        CLOSED,
        STREAMED
        + "compute(layers)\nin_child(lambda: raises(errors.ClosedError, run))\nassert compute(layers).equal(wanted)\n",
        STREAMED
        + """
threading.Thread(target=run, daemon=True).start()
time.sleep(0.1)
in_child(lambda: raises(errors.ClosedError, run))
""",
    ),
    (FORWARD, "exit"): (ENDS, STREAMED + "leave(run, busy())"),
    (CLOSE, "close"): (
        "both return",
        STREAMED
        + "threading.Thread(target=unless_closed(run), daemon=True).start()\nboth_close(offloader.close, busy())\n",
    ),
    (CLOSE, "Ctrl-C"): (
        "raises; close it again",
        STREAMED
        + """
run_until_moving(run)
interrupted_close(offloader.close)
offloader.close()
raises(errors.ClosedError, run)
""",
    ),
    (CLOSE, "fork"): (
        "returns, and does nothing",
        STREAMED + "in_child(lambda: returns(offloader.close))\nassert compute(layers).equal(wanted)\n",
    ),
    (CLOSE, "exit"): (
        ENDS,
        STREAMED
        + """
run_until_moving(run)
leave(offloader.close, at(0))
""",
    ),
}
