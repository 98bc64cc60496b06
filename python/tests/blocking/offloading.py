"""Offloaded parameters during close, Ctrl-C, fork and exit."""

from .results import CLOSED, GIVEN_UP, Cells
from .training import MODEL

OFFLOADED = (
    MODEL
    + """
import copy
twin = copy.deepcopy(model)
offloaded = deepnvme.offload_parameters(model, memory=13 << 20, swap_dir=".")
def train(one=model):
    loss = one(x).square().sum()
    loss.backward()
    return float(loss)
def is_writing():
    return any(name.endswith(".deepnvme-tmp") or name.startswith(".model") for name in os.listdir())
"""
)
# A call that the disk decides.
BEGINNING = (
    MODEL
    + """
import copy
twin = copy.deepcopy(model)
def offload():
    return deepnvme.offload_parameters(model, memory=13 << 20, swap_dir=".")
def is_as_before():
    return all(map(torch.equal, model.parameters(), twin.parameters()))
"""
)
# Calls that are finished have to end in time.
SMALL = OFFLOADED.replace("1024", "256").replace("13 << 20", "13 << 16")
LOADED = "state = {name: tensor + 1 for name, tensor in twin.state_dict().items()}\n"
# It is refused while a group is in use, and succeeds in between.
CLOSE = """
def close():
    try:
        offloaded.close()
    except RuntimeError:
        pass
"""
STATE = OFFLOADED + LOADED

BEGIN, OFFLOAD, OFF_CLOSE = (
    "`offload_parameters`",
    "forward and backward with `offload_parameters`",
    "`ParameterOffload.close`",
)
OFF_SAVE, OFF_LOAD = "`ParameterOffload.save`", "`ParameterOffload.load_state_dict`"
GATHERED = "`ParameterOffload.gathered`, and `state_dict` of such a model"
ROWS = (BEGIN, OFFLOAD, GATHERED, OFF_SAVE, OFF_LOAD, OFF_CLOSE)

GATHERING = (
    OFFLOADED
    + """
def gather():
    while True:
        for layer in model.layers:
            with offloaded.gathered(layer.parameters()):
                pass
"""
)


def beginning_cells(row: str, setup: str) -> Cells:
    """Return the cells of a function that moves parameters, which ``setup`` calls ``offload``."""
    return {
        (row, "Ctrl-C"): (
            "raises; all parameters are in memory, as before",
            setup
            + """
ends_at_interrupt(offload)
assert is_as_before() and not hasattr(model, "offloading")
offload().close()
assert is_as_before()
""",
        ),
        (row, "fork"): (
            "moves them, with an engine of its own",
            setup
            + """
def begin():
    with offload():
        assert model(x).shape == x.shape
    assert is_as_before()
in_child(begin)
""",
        ),
        (row, "exit"): (GIVEN_UP, setup + "leave_closed(offload, busy())"),
    }


CELLS: Cells = {
    **beginning_cells(BEGIN, BEGINNING),
    (GATHERED, "Ctrl-C"): (
        "raises; nothing is held",
        GATHERING
        + """
ends_at_interrupt(gather)
event_times.clear()
ends_at_interrupt(lambda: [model.state_dict() for _ in range(1000)])
with offloaded.gathered(model.layers[0].parameters(), write=True):
    assert model.layers[0].weight.equal(twin.layers[0].weight)
offloaded.close()
assert all(map(torch.equal, model.parameters(), twin.parameters()))
""",
    ),
    (GATHERED, "fork"): (
        CLOSED,
        OFFLOADED
        + """
in_child(lambda: [raises(errors.ClosedError, call) for call in (
    lambda: offloaded.gathered([model.layers[0].weight]).__enter__(),
    model.state_dict,
)])
offloaded.close()
""",
    ),
    (GATHERED, "exit"): (
        GIVEN_UP,
        GATHERING
        + """
leave_closed(gather, busy())
""",
        OFFLOADED + "leave_closed(lambda: [model.state_dict() for _ in range(1000)], busy())",
    ),
    (OFF_SAVE, "close"): (
        "finishes, then returns",
        SMALL
        + CLOSE
        + """
soon(close, is_writing)
returns(lambda: offloaded.save("model.safetensors", durability="none"))
saved = deepnvme.load("model.safetensors")
assert all(map(torch.equal, saved.values(), twin.state_dict().values()))
""",
    ),
    (OFF_SAVE, "Ctrl-C"): (
        "raises; no file appears",
        OFFLOADED
        + """
ends_at_interrupt(lambda: offloaded.save("model.safetensors"), is_writing)
assert os.listdir() == ["output"], os.listdir()
offloaded.save("model.safetensors", durability="none")
offloaded.close()
saved = deepnvme.load("model.safetensors")
assert all(map(torch.equal, saved.values(), twin.state_dict().values()))
""",
    ),
    (OFF_SAVE, "fork"): (
        CLOSED,
        OFFLOADED
        + """
in_child(lambda: raises(errors.ClosedError, lambda: offloaded.save("model.safetensors")))
assert os.listdir() == ["output"], os.listdir()
offloaded.close()
""",
    ),
    (OFF_SAVE, "exit"): (
        "raises `ClosedError` in its thread; no file appears",
        OFFLOADED + "leave_closed(lambda: offloaded.save('model.safetensors'), is_writing)",
    ),
    (OFF_LOAD, "close"): (
        "finishes, then returns",
        SMALL
        + LOADED
        + CLOSE
        + """
soon(close, busy())
returns(lambda: offloaded.load_state_dict(state))
offloaded.close()
assert all(map(torch.equal, model.parameters(), state.values()))
""",
    ),
    (OFF_LOAD, "Ctrl-C"): (
        "raises; some parameters are loaded: load again",
        STATE
        + """
ends_at_interrupt(lambda: [offloaded.load_state_dict(state) for _ in range(1000)])
offloaded.load_state_dict(state)
offloaded.close()
assert all(map(torch.equal, model.parameters(), state.values()))
""",
    ),
    (OFF_LOAD, "fork"): (
        CLOSED,
        STATE
        + """
in_child(lambda: raises(errors.ClosedError, lambda: offloaded.load_state_dict(state)))
offloaded.close()
assert all(map(torch.equal, model.parameters(), twin.parameters()))
""",
    ),
    (OFF_LOAD, "exit"): (
        GIVEN_UP,
        STATE + "leave_closed(lambda: [offloaded.load_state_dict(state) for _ in range(1000)], busy())",
    ),
    (OFFLOAD, "Ctrl-C"): (
        "raises; the model can be used further",
        OFFLOADED
        + """
def trains():
    for _ in range(50):
        train()
wanted = train(twin)
ends_at_interrupt(trains)
model.zero_grad()
assert train() == wanted
assert all(torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), twin.parameters(), strict=True))
offloaded.close()
""",
    ),
    (OFFLOAD, "fork"): (
        CLOSED,
        OFFLOADED + "train()\nin_child(lambda: raises(errors.ClosedError, train))\ntrain()\noffloaded.close()",
    ),
    (OFFLOAD, "exit"): (
        GIVEN_UP,
        OFFLOADED + "leave_closed(lambda: [train() for _ in range(50)], busy())",
    ),
    (OFF_CLOSE, "Ctrl-C"): (
        "raises; close it again",
        OFFLOADED
        + """
train()
ends_at_interrupt(offloaded.close)
offloaded.close()
assert all(map(torch.equal, model.parameters(), twin.parameters()))
""",
    ),
    (OFF_CLOSE, "fork"): (
        CLOSED,
        OFFLOADED + "train()\nin_child(lambda: raises(errors.ClosedError, offloaded.close))\noffloaded.close()",
    ),
    (OFF_CLOSE, "exit"): (GIVEN_UP, OFFLOADED + "train()\nleave_closed(offloaded.close, busy())"),
}
