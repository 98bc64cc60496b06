"""Calls of DeepSpeed's handles during Ctrl-C, fork and exit. A handle has no close."""

from .results import FIRST, HALF_WRITTEN, LEFT, Cells

# Its engine is its own.
AIO = """
import torch
from deepnvme.deepspeed import aio_handle, aio_read, aio_write
tensor = torch.frombuffer(data, dtype=torch.uint8)
handle = aio_handle(4096, 1, False, False, 1)
def moved():
    engine = handle._operations._engine
    return 0 if engine is None else engine.stats().bytes_written + engine.stats().bytes_read
def started():
    return moved() > 0
"""
PENDING = AIO + "handle.async_pwrite(tensor[:PART], 'aio')\n"

WAIT = "`aio_handle.wait`"
SYNC = "`aio_handle.sync_pread`, `sync_pwrite`, `read`, `write`; `pread` and `pwrite` that wait"
ASYNC = "`aio_handle.async_pread`, `async_pwrite`; `pread` and `pwrite` that do not wait"
FUNCTIONS = "`aio_read`, `aio_write`"
ROWS = (WAIT, SYNC, ASYNC, FUNCTIONS)

REFUSED = "raises `RuntimeError`"

WAITING = (
    "handle.sync_pread(tensor, 'big')",
    "handle.sync_pwrite(tensor, 'aio')",
    "handle.read(tensor, 'big', False)",
    "handle.write(tensor, 'aio', False)",
    "handle.pread(tensor, 'big', False, False)",
    "handle.pwrite(tensor, 'aio', False, False)",
)
# They wait for the operation on the same bytes.
QUEUED = (
    "handle.async_pread(tensor[:PART], 'aio')",
    "handle.async_pwrite(tensor[:PART], 'aio')",
    "handle.pread(tensor[:PART], 'aio', False, True)",
    "handle.pwrite(tensor[:PART], 'aio', False, True)",
)
MADE = (
    "aio_read(tensor, 'big', 4096, 1, False, False, False)",
    "aio_write(tensor, 'aio', 4096, 1, False, False, False)",
)

CELLS: Cells = {
    (WAIT, "Ctrl-C"): (
        "raises; nothing is counted, and the transfers go on",
        AIO + "handle.async_pwrite(tensor, 'aio')\nends_at_interrupt(handle.wait, started)\nos._exit(0)",
        PENDING + "ends_at_interrupt(handle.wait, started)\nassert handle.wait() == 1",
    ),
    (WAIT, "fork"): (REFUSED, PENDING + "in_child(lambda: raises(RuntimeError, handle.wait))\nhandle.wait()"),
    (WAIT, "exit"): (FIRST, PENDING + "leave(handle.wait, started)"),
    (SYNC, "Ctrl-C"): (
        LEFT,
        *(
            AIO
            + f"ends_at_interrupt(lambda: {call}, started)\n"
            + "assert moved() < SIZE\nassert handle.wait() == 0\n"
            + "assert handle.sync_pwrite(tensor[:PART], 'other') == 1\n"
            for call in WAITING
        ),
        # With another pending, it is one of them.
        PENDING
        + """
ends_at_interrupt(lambda: handle.sync_pwrite(tensor[PART : 8 * PART], "aio", PART), at(0.1))
assert handle.wait() == 2
""",
    ),
    (SYNC, "fork"): (
        REFUSED,
        *(PENDING + f"in_child(lambda: raises(RuntimeError, lambda: {call}))\nhandle.wait()" for call in WAITING),
    ),
    (SYNC, "exit"): (HALF_WRITTEN, *(AIO + f"leave(lambda: {call}, started)" for call in WAITING)),
    (ASYNC, "Ctrl-C"): (
        "raises; nothing is queued",
        *(PENDING + f"ends_at_interrupt(lambda: {call}, started)\nassert handle.wait() == 1" for call in QUEUED),
    ),
    (ASYNC, "fork"): (
        REFUSED,
        *(PENDING + f"in_child(lambda: raises(RuntimeError, lambda: {call}))\nhandle.wait()" for call in QUEUED),
    ),
    (ASYNC, "exit"): (
        "the queue finishes first",
        # Calls that are finished have to end in time.
        *((PENDING + f"leave(lambda: {call}, started)").replace("PART", "PART // 4") for call in QUEUED),
    ),
    (FUNCTIONS, "Ctrl-C"): (
        LEFT,
        *(AIO + f"ends_at_interrupt(lambda: {call}, at(0.1))" for call in MADE),
    ),
    (FUNCTIONS, "fork"): (
        "transfer, with an engine of their own",
        AIO
        + """
tensor = tensor[:PART]
def transfer():
    tensor.fill_(2)
    aio_write(tensor, "aio", 4096, 1, False, False, False)
    assert aio_read(torch.ones_like(tensor), "aio", 4096, 1, False, False, True) == 0
transfer()
in_child(transfer)
""",
    ),
    (FUNCTIONS, "exit"): (HALF_WRITTEN, *(AIO + f"leave(lambda: {call}, at(0.1))" for call in MADE)),
}
