"""Streamed models and optimizers during close, Ctrl-C, fork and exit."""

from .results import CLOSED, ENDS, GIVEN_UP, Cells

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
torch.manual_seed(1)
model = Model()
x = torch.ones(1, 1024)
"""
STREAMED = (
    MODEL
    + """
with torch.no_grad():
    wanted = model(x)
deepnvme.save(model.state_dict(), "model.safetensors", durability="none")
with torch.device("meta"):
    model = Model().eval()
model = deepnvme.stream(model, weights="model.safetensors", memory=9 << 20)
def run():
    with torch.no_grad():
        for _ in range(50):
            model(x)
"""
)
# All weights but those of a small part stay in memory, and are read by the call.
STREAMING = (
    MODEL
    + """
with torch.no_grad():
    wanted = model(x)
deepnvme.save(model.state_dict(), "model.safetensors", durability="none", engine=deepnvme.Engine())
with torch.device("meta"):
    model = Model().eval()
def stream(**options):
    return deepnvme.stream(model, weights="model.safetensors", memory=64 << 20, **options)
"""
)
OPTIMIZER = """
params = [nn.Parameter(torch.ones(1 << 19)) for _ in range(8)]
optimizer = optim.AdamW(params, swap_dir=".", memory="8MiB")
for param in params:
    param.grad = torch.ones_like(param)
optimizer.step()
"""
# Gradients go to disk in the backward pass.
BACKWARD_PASS = """
torch.manual_seed(1)
def made():
    return [nn.Parameter(torch.full((1 << 19,), 1.0 + index)) for index in range(8)]
def losses(params):
    return sum((param * param).sum() for param in params)
params, wanted = made(), made()
optimizer = optim.AdamW(params, swap_dir=".", memory="8MiB", swap_gradients=True)
reference = optim.AdamW(wanted)
losses(params).backward()
optimizer.step()
optimizer.zero_grad()
"""
STREAM = "`stream`"
FORWARD, STREAM_CLOSE = "a streamed model's `forward`, `generate`", "`streaming.close`"
STATE_DICT, LOAD_DICT = "`state_dict` of such an optimizer", "`load_state_dict` of such an optimizer"
STEP, SAVE_STATE, OPT_CLOSE = "`step` with `swap_dir=`", "`save_state`, `load_state`", "`close` of such an optimizer"
BACKWARD = "`backward` with `swap_gradients=True`"
ROWS = (STREAM, FORWARD, STREAM_CLOSE, BACKWARD, STEP, STATE_DICT, LOAD_DICT, SAVE_STATE, OPT_CLOSE)

CELLS: Cells = {
    (STREAM, "close"): (
        "raises `ClosedError`; the model is as before",
        STREAMING
        + """
ends_at_close(stream, deepnvme.default_engine().close)
assert not hasattr(model, "streaming") and all(param.is_meta for param in model.parameters())
""",
    ),
    (STREAM, "Ctrl-C"): (
        "raises; the model is as before",
        STREAMING
        + """
ends_at_interrupt(stream)
assert not hasattr(model, "streaming") and all(param.is_meta for param in model.parameters())
stream()
with torch.no_grad():
    assert model(x).equal(wanted)
""",
        STREAMING + "ends_at_interrupt(lambda: stream(verify='full'))",
    ),
    (STREAM, "fork"): (
        "streams, with an engine of its own",
        STREAMING
        + """
def run():
    stream()
    with torch.no_grad():
        assert model(x).equal(wanted)
in_child(run)
""",
    ),
    (STREAM, "exit"): (ENDS, STREAMING + "leave(stream, busy())"),
    (FORWARD, "close"): (
        (
            "raises `ClosedError` at its next layer; a later call computes with the weights that the model had before "
            "`stream`, or raises `ClosedError` on the meta device"
        ),
        STREAMED
        + """
is_in_layer = threading.Event()
def stay(module, inputs, output):
    is_in_layer.set()
    while not model.streaming.is_closed:
        time.sleep(0.001)
model.layers[3].register_forward_hook(stay)
model.layers[4].register_forward_hook(lambda *_: os._exit(1))
closer = soon(model.streaming.close, is_in_layer.is_set)
raises(errors.ClosedError, run)
closer.join(20)
# The model had no weights.
event_times.clear()
raises(errors.ClosedError, run)
""",
        MODEL
        + """
deepnvme.save(model.state_dict(), "model.safetensors", durability="none")
with torch.no_grad():
    for param in model.parameters():
        param.mul_(2)
    own, wanted = [param.clone() for param in model.parameters()], model(x)
deepnvme.stream(model, weights="model.safetensors", memory=9 << 20)
def run():
    with torch.no_grad():
        while True:
            assert not model(x).equal(wanted)
soon(model.streaming.close, busy())
try:
    run()
except (AssertionError, errors.ClosedError):
    check_time()
model.streaming.close()
with torch.no_grad():
    assert model(x).equal(wanted)
assert all(map(torch.equal, model.parameters(), own))
""",
    ),
    (FORWARD, "Ctrl-C"): (
        "raises; the model can be used further",
        STREAMED
        + """
ends_at_interrupt(run)
with torch.no_grad():
    assert model(x).equal(wanted)
model.streaming.close()
""",
    ),
    (FORWARD, "fork"): (
        CLOSED,
        STREAMED + "in_child(lambda: raises(errors.ClosedError, run))\nmodel.streaming.close()",
    ),
    (FORWARD, "exit"): (ENDS, STREAMED + "leave(run, busy())"),
    (STREAM_CLOSE, "close"): (
        "both return, when the layers that run have ended",
        STREAMED
        + """
moves = busy()
def until_closed():
    try:
        run()
    except errors.ClosedError:
        pass
threading.Thread(target=until_closed, daemon=True).start()
both_close(model.streaming.close, moves)
""",
    ),
    (STREAM_CLOSE, "Ctrl-C"): (
        "raises; close it again",
        STREAMED
        + """
def close():
    event_times.append(time.monotonic())
    interrupt()
    model.streaming.close()
    time.sleep(0.2)
raises(KeyboardInterrupt, close)
model.streaming.close()
assert model.streaming.is_closed
""",
    ),
    (STREAM_CLOSE, "fork"): (
        "returns, and does nothing",
        STREAMED
        + """
in_child(lambda: returns(model.streaming.close))
with torch.no_grad():
    assert model(x).equal(wanted)
model.streaming.close()
""",
    ),
    (STREAM_CLOSE, "exit"): (ENDS, STREAMED + "leave(model.streaming.close, at(0))"),
    (BACKWARD, "close"): (
        CLOSED,
        BACKWARD_PASS
        + """
loss = losses(params)
ends_at_close(loss.backward, optimizer.close)
""",
    ),
    (BACKWARD, "Ctrl-C"): (
        "raises; call `zero_grad`, and repeat the pass",
        BACKWARD_PASS
        + """
loss = losses(params)
ends_at_interrupt(loss.backward)
optimizer.zero_grad()
losses(params).backward()
optimizer.step()
for _ in range(2):
    losses(wanted).backward()
    reference.step()
    reference.zero_grad()
assert all(map(torch.equal, params, wanted))
""",
    ),
    (BACKWARD, "fork"): (
        CLOSED,
        BACKWARD_PASS + "in_child(lambda: raises(errors.ClosedError, lambda: losses(params).backward()))",
    ),
    (BACKWARD, "exit"): (GIVEN_UP, BACKWARD_PASS + "leave_closed(losses(params).backward, busy())"),
    (STEP, "close"): (
        CLOSED,
        OPTIMIZER + "soon(optimizer.close, busy())\nraises(errors.ClosedError, optimizer.step)",
    ),
    (STEP, "Ctrl-C"): (
        "raises; the next `step` goes on with it",
        OPTIMIZER
        + """
theirs = [nn.Parameter(torch.ones(1 << 19)) for _ in range(8)]
reference = optim.AdamW(theirs)
for _ in range(2):
    for param in theirs:
        param.grad = torch.ones_like(param)
    reference.step()
ends_at_interrupt(optimizer.step)
optimizer.step()
assert all(map(torch.equal, params, theirs))
optimizer.close()
""",
    ),
    (STEP, "fork"): (
        CLOSED,
        OPTIMIZER + "in_child(lambda: raises(errors.ClosedError, optimizer.step))\noptimizer.step()\noptimizer.close()",
    ),
    (STEP, "exit"): (GIVEN_UP, OPTIMIZER + "leave_closed(optimizer.step, busy())"),
    (STATE_DICT, "close"): (
        CLOSED,
        OPTIMIZER + "soon(optimizer.close, busy())\nraises(errors.ClosedError, optimizer.state_dict)",
    ),
    (STATE_DICT, "Ctrl-C"): (
        "raises",
        OPTIMIZER
        + """
ends_at_interrupt(optimizer.state_dict)
assert len(optimizer.state_dict()["state"]) == 8
optimizer.step()
optimizer.close()
""",
    ),
    (STATE_DICT, "fork"): (
        CLOSED,
        OPTIMIZER + "in_child(lambda: raises(errors.ClosedError, optimizer.state_dict))\noptimizer.close()",
    ),
    (STATE_DICT, "exit"): (GIVEN_UP, OPTIMIZER + "leave_closed(optimizer.state_dict, busy())"),
    (LOAD_DICT, "close"): (
        CLOSED,
        OPTIMIZER
        + """
state = optimizer.state_dict()
ends_at_close(lambda: optimizer.load_state_dict(state), optimizer.close)
""",
    ),
    (LOAD_DICT, "Ctrl-C"): (
        "raises; the state is to be loaded again",
        OPTIMIZER
        + """
state = optimizer.state_dict()
before = [param.clone() for param in params]
ends_at_interrupt(lambda: optimizer.load_state_dict(state))
raises(RuntimeError, optimizer.step)
raises(RuntimeError, optimizer.state_dict)
assert all(map(torch.equal, params, before))
optimizer.load_state_dict(state)
found = optimizer.state_dict()["state"]
assert all(found[index]["exp_avg"].equal(state["state"][index]["exp_avg"]) for index in range(8))
optimizer.step()
optimizer.close()
""",
    ),
    (LOAD_DICT, "fork"): (
        CLOSED,
        OPTIMIZER
        + """
state = optimizer.state_dict()
in_child(lambda: raises(errors.ClosedError, lambda: optimizer.load_state_dict(state)))
optimizer.close()
""",
    ),
    (LOAD_DICT, "exit"): (
        GIVEN_UP,
        OPTIMIZER + "state = optimizer.state_dict()\nleave_closed(lambda: optimizer.load_state_dict(state), busy())",
    ),
    (SAVE_STATE, "close"): (
        "raises `ClosedError`; no file appears",
        OPTIMIZER
        + """
is_writing = lambda: any(name.startswith(".state") for name in os.listdir())
ends_at_close(lambda: optimizer.save_state("state"), optimizer.close, is_writing)
assert "state" not in os.listdir()
""",
        OPTIMIZER
        + """
optimizer.save_state("state")
ends_at_close(lambda: optimizer.load_state("state"), optimizer.close)
""",
    ),
    (SAVE_STATE, "Ctrl-C"): (
        "raises; no file appears, or the state is to be loaded again",
        OPTIMIZER
        + """
is_writing = lambda: any(name.startswith(".state") for name in os.listdir())
ends_at_interrupt(lambda: optimizer.save_state("state"), is_writing)
assert not is_writing() and "state" not in os.listdir()
optimizer.save_state("state")
state, load = optimizer.state_dict(), optimizer.load_state
def interrupted():
    event_times.append(time.monotonic())
    interrupt()
    load("state")
event_times.clear()
raises(KeyboardInterrupt, interrupted)
load("state")
optimizer.step()
optimizer.close()
""",
    ),
    (SAVE_STATE, "fork"): (
        CLOSED,
        OPTIMIZER
        + """
optimizer.save_state("state")
in_child(lambda: [raises(errors.ClosedError, call) for call in (
    lambda: optimizer.save_state("other"), lambda: optimizer.load_state("state"))])
optimizer.close()
""",
    ),
    (SAVE_STATE, "exit"): (
        "raises `ClosedError` in its thread; no file appears",
        OPTIMIZER
        + """
leave_closed(lambda: optimizer.save_state("state"), lambda: any(name.startswith(".state") for name in os.listdir()))
""",
        OPTIMIZER + "optimizer.save_state('other')\nleave_closed(lambda: optimizer.load_state('other'), busy())",
    ),
    (OPT_CLOSE, "close"): (
        "both return",
        OPTIMIZER
        + """
moves = busy()
threading.Thread(target=unless_closed(optimizer.step), daemon=True).start()
both_close(optimizer.close, moves)
""",
    ),
    (OPT_CLOSE, "fork"): (
        "returns, and does nothing",
        OPTIMIZER + "in_child(lambda: returns(optimizer.close))\noptimizer.step()",
    ),
    (OPT_CLOSE, "exit"): (ENDS, OPTIMIZER + "leave(optimizer.close, at(0))"),
}
