"""Training with everything on disk, activations on disk, and spilled models, during close, Ctrl-C, fork and exit."""

from .offloading import beginning_cells
from .results import CLOSED, ENDS, GIVEN_UP, Cells
from .training import MODEL

# 32 MB of weights, as much of gradients, and twice as much of state.
BEGINNING = (
    MODEL
    + """
import copy
twin = copy.deepcopy(model)
def begin_training():
    return deepnvme.offload(model, torch.optim.AdamW, lr=1e-3, memory=24 << 20, swap_dir=".")
def offload():
    begin_training()
    return model.offloading
def is_as_before():
    return all(map(torch.equal, model.parameters(), twin.parameters()))
"""
)
TRAINED = (
    BEGINNING
    + """
_, optimizer = begin_training()
plain = torch.optim.AdamW(twin.parameters(), lr=1e-3, foreach=False)
def losses(one, its):
    loss = one(x).square().sum()
    loss.backward()
    its.step()
    its.zero_grad()
    return float(loss)
def trains():
    for _ in range(50):
        losses(model, optimizer)
"""
)
ACTIVATIONS = (
    MODEL.replace("torch.ones(1, 1024)", "torch.ones(1024, 1024)")
    + """
activations = deepnvme.offload_activations(".", memory="9MB")
def loss_of():
    with activations:
        return model(x).square().sum()
def gradients():
    model.zero_grad()
    loss_of().backward()
    return [one.grad for one in model.parameters()]
def trains():
    for _ in range(50):
        gradients()
"""
)

SPILLED = (
    MODEL
    + """
import copy
twin = copy.deepcopy(model)
def spill():
    return deepnvme.spill(model, swap_dir=".")
def is_as_before():
    return all(map(torch.equal, model.parameters(), twin.parameters()))
def cycles():
    for _ in range(500):
        with spill():
            pass
"""
)

BEGIN, TRAIN = "`offload`", "forward, backward and `step` with `offload`"
MOVED = "forward and backward with `offload_activations`"
SPILL = "`spill`, and `Spilled.restore`"
ROWS = (BEGIN, TRAIN, MOVED, SPILL)

CELLS: Cells = {
    **beginning_cells(BEGIN, BEGINNING),
    (TRAIN, "Ctrl-C"): (
        "raises; the next `step` goes on with a step that was stopped; otherwise repeat the pass after `zero_grad`",
        TRAINED
        + """
ends_at_interrupt(trains)
if optimizer.has_unfinished_step:
    optimizer.step()
optimizer.zero_grad()
twin.load_state_dict(model.state_dict())
loss = model(x).square().sum()
assert float(loss) == float(twin(x).square().sum())
loss.backward()
optimizer.step()
optimizer.close()
""",
    ),
    (TRAIN, "fork"): (
        CLOSED,
        TRAINED
        + """
assert losses(model, optimizer) == losses(twin, plain)
in_child(lambda: raises(errors.ClosedError, lambda: losses(model, optimizer)))
assert losses(model, optimizer) == losses(twin, plain)
optimizer.close()
""",
    ),
    (TRAIN, "exit"): (GIVEN_UP, TRAINED + "leave_closed(trains, busy())"),
    (MOVED, "close"): (CLOSED, ACTIVATIONS + "ends_at_close(trains, activations.close)"),
    (MOVED, "Ctrl-C"): (
        "raises; the next pass is right",
        ACTIVATIONS
        + """
wanted = [one.clone() for one in gradients()]
ends_at_interrupt(trains)
assert all(map(torch.equal, gradients(), wanted))
activations.close()
""",
    ),
    (MOVED, "fork"): (
        CLOSED,
        ACTIVATIONS
        + """
loss = loss_of()
in_child(lambda: [raises(errors.ClosedError, call) for call in (loss_of, loss.backward)])
loss.backward()
activations.close()
""",
    ),
    (MOVED, "exit"): (GIVEN_UP, ACTIVATIONS + "leave_closed(trains, busy())"),
    (SPILL, "Ctrl-C"): (
        "raises; `model.spilled.restore()` fills what is not in memory",
        SPILLED
        + """
ends_at_interrupt(cycles)
if hasattr(model, "spilled"):
    model.spilled.restore()
assert is_as_before()
with spill():
    pass
assert is_as_before()
""",
    ),
    (SPILL, "fork"): (
        "restores in each process, with an engine of its own",
        SPILLED
        + """
spilled = spill()
def restore():
    spilled.restore()
    assert is_as_before()
    with spill():
        pass
    assert is_as_before()
in_child(restore)
restore()
""",
    ),
    (SPILL, "exit"): (ENDS, SPILLED + "leave(cycles, busy())"),
}
