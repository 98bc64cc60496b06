"""Gathers of rows during cancel, close, Ctrl-C, fork and exit."""

from .results import CLOSED, ENDS, FINISHED, LEFT, Cells

# An engine that takes seconds for all rows, and a table without a cache.
TABLE = """
slow = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
with open("rows", "wb") as file:
    file.truncate(1 << 30)
table = deepnvme.RowStore("rows", shape=(1 << 18, 4096), dtype=torch.uint8, memory="64KiB", engine=slow)
def gather(rows, start=False):
    ids = torch.arange(0, 2 * rows, 2)
    return (table.start_gather if start else table.gather)(ids, out=torch.empty(rows, 4096, dtype=torch.uint8))
def moves():
    return table.stats().rows_read > 20
ALL, SOME = 1 << 17, 3000
"""
PENDING = TABLE + "pending = gather(ALL, start=True)\n"

GATHER, RESULT = "`RowStore.gather`, `start_gather`", "`Gather.result`"
KEEP = "`RowStore.keep`"
CREATE = "`RowStore.create`"
VERIFY = "`RowStore.verify`"
OPEN = "making a `RowStore`"
ROWS = (OPEN, CREATE, GATHER, VERIFY, KEEP, RESULT)
# Half of the rows that memory has room for.
KEEPING = TABLE.replace('"64KiB"', '"64MiB"') + "many = torch.arange(0, 14000, 2)\nkeep = lambda: table.keep(many)\n"

# 2 GiB of scales, which the engine takes seconds to read.
SCALED = """
import json
slow = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
def scaled(rows):
    nbytes = 1024 * rows
    tensors = {
        "table": {"dtype": "I8", "shape": [rows, 1024], "data_offsets": [0, nbytes]},
        "scales": {"dtype": "F32", "shape": [rows, 256], "data_offsets": [nbytes, 2 * nbytes]},
    }
    header = json.dumps(tensors).encode()
    with open("scaled.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * nbytes)
def make(engine=None):
    return deepnvme.RowStore("scaled.safetensors", "table", scales="scales", memory="4GiB", engine=engine)
def moves():
    return slow.stats().bytes_read > 1 << 20
"""
LARGE = SCALED + "scaled(1 << 21)\n"

PACKING = """
deepnvme.default_engine()
with open("rows", "wb") as file:
    file.truncate(4 << 30)
def create(rows=1 << 20):
    return deepnvme.RowStore.create("packed", "rows", shape=(rows, 4096), dtype=torch.uint8, memory="16MB")
def moves():
    return deepnvme.stats().bytes_written > 1 << 20
"""

PACKED = """
with open("rows", "wb") as file:
    file.truncate(1 << 27)
table = deepnvme.RowStore.create("packed", "rows", shape=(1 << 15, 4000), dtype=torch.uint8, memory="64KiB")
moves = busy()
"""

CELLS: Cells = {
    (OPEN, "Ctrl-C"): (
        "raises; reads that have not begun are cancelled",
        LARGE + "ends_at_interrupt(lambda: make(slow), moves)\n"
        "time.sleep(1)\nbefore = slow.stats().bytes_read\ntime.sleep(0.2)\nassert slow.stats().bytes_read == before",
    ),
    (OPEN, "fork"): (
        "opens the table, with an engine of its own",
        SCALED + "scaled(10)\nmake()\nin_child(lambda: make().gather([1]))",
    ),
    (OPEN, "exit"): (ENDS, LARGE + "leave(lambda: make(slow), moves)"),
    (VERIFY, "close"): (CLOSED, PACKED + "soon(table.close, moves)\nraises(errors.ClosedError, table.verify)"),
    (VERIFY, "Ctrl-C"): ("raises", PACKED + "ends_at_interrupt(table.verify, moves)"),
    (VERIFY, "fork"): (CLOSED, PACKED + "in_child(lambda: raises(errors.ClosedError, table.verify))"),
    (VERIFY, "exit"): (ENDS, PACKED + "leave(table.verify, moves)"),
    (CREATE, "Ctrl-C"): (
        "raises; no file appears",
        PACKING + "ends_at_interrupt(create, moves)\nassert not [name for name in os.listdir() if 'packed' in name]",
    ),
    (CREATE, "fork"): ("packs, with an engine of its own", PACKING + "in_child(lambda: create(100))"),
    (CREATE, "exit"): ("the process ends; the file is whole or absent", PACKING + "leave(create, moves)"),
    (GATHER, "close"): (
        FINISHED,
        TABLE + "soon(table.close, moves)\nassert len(returns(lambda: gather(SOME))) == SOME",
    ),
    (GATHER, "Ctrl-C"): (
        LEFT,
        TABLE + "ends_at_interrupt(lambda: gather(ALL), moves)\n"
        "assert table.stats().rows_read < ALL\nassert gather(1).eq(0).all()",
    ),
    (GATHER, "fork"): (
        CLOSED,
        TABLE + "in_child(lambda: [raises(errors.ClosedError, lambda: gather(1, start)) for start in (False, True)])",
    ),
    (GATHER, "exit"): (ENDS, TABLE + "leave(lambda: gather(ALL), moves)"),
    (KEEP, "close"): (CLOSED, KEEPING + "soon(table.close, moves)\nraises(errors.ClosedError, keep)"),
    (KEEP, "Ctrl-C"): (
        "raises; some rows may be kept",
        KEEPING + "ends_at_interrupt(keep, moves)\ntable.keep(many[:100])",
    ),
    (KEEP, "fork"): (CLOSED, KEEPING + "in_child(lambda: raises(errors.ClosedError, keep))"),
    (KEEP, "exit"): (ENDS, KEEPING + "leave(keep, moves)"),
    (RESULT, "cancel"): (
        "raises `CancelledError`",
        PENDING + "soon(pending.cancel, moves)\nraises(errors.CancelledError, pending.result)",
    ),
    (RESULT, "timeout"): (
        "raises `WaitTimeoutError`; the gather goes on",
        PENDING + "event_times.append(time.monotonic() + 0.1)\n"
        "raises(errors.WaitTimeoutError, lambda: pending.result(0.1))\nassert not pending.done()",
    ),
    (RESULT, "close"): (
        FINISHED,
        TABLE
        + "pending = gather(SOME, start=True)\nsoon(table.close, moves)\nassert len(returns(pending.result)) == SOME",
    ),
    (RESULT, "Ctrl-C"): (
        "raises; the gather goes on",
        PENDING + "ends_at_interrupt(pending.result, moves)\nassert not pending.done()",
    ),
    (RESULT, "fork"): (CLOSED, PENDING + "in_child(lambda: raises(errors.ClosedError, pending.result))"),
    (RESULT, "exit"): (ENDS, PENDING + "leave(pending.result, moves)"),
}
