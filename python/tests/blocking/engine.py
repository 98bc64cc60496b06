"""Calls of engines and files during close, Ctrl-C, fork and exit."""

from .results import CLOSED, ENDS, FINISHED, FIRST, HALF_WRITTEN, LEFT, Cells

SETUP = """
SIZE = 1 << 30
PART = 8 << 20
engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
with open("big", "wb") as big:
    big.truncate(SIZE)
# Pages that are only reserved: zeroing them would take longer than most cells.
data = memoryview(mmap.mmap(-1, SIZE))
stripes = deepnvme.StripeSet(["part-0", "part-1"])

def started():
    stats = engine.stats()
    return stats.bytes_written + stats.bytes_read > 0
"""

READ_WRITE = "`read`, `write` and their batches"
STRIPES = "the same with a `StripeSet`"
WAIT = "`Transfer.result`"
AWAIT = "`await transfer`"
WITH = "`with transfer:`"
FILE_READ = "`file.read`, `file.readinto`"
FILE_WRITE = "`file.write`"
FILE_CLOSE = "`file.close` after writing"
CLOSE = "`Engine.close`"
ROWS = (READ_WRITE, STRIPES, WAIT, AWAIT, WITH, FILE_READ, FILE_WRITE, FILE_CLOSE, CLOSE)

PENDING = "pending = engine.start_write(data, 'file')\n"
SMALL = "pending = engine.start_write(data[:PART], 'file')\n"
# A closed engine has no figures.
MOVES = "moves = lambda: pending.progress().bytes_done > 0\n"
WRITER = "writer = deepnvme.open('new', 'wb', engine=engine)\n"
AWAITING = """
async def main():
    return await pending
"""
GOES_ON = "raises; the transfer goes on"

CELLS: Cells = {
    (READ_WRITE, "close"): (
        FINISHED,
        *(
            f"part = data[:PART]\nsoon(engine.close, started)\nassert returns(lambda: {call})"
            for call in (
                "engine.write(part, 'file') == PART",
                "engine.read(part, 'big') == PART",
                "engine.write_batch([('file', 0, part)]) == PART",
                "engine.read_batch([('big', 0, part)]) == PART",
            )
        ),
    ),
    (READ_WRITE, "Ctrl-C"): (
        LEFT,
        """
for call in (
    lambda: engine.write(data, "file"),
    lambda: engine.read(data, "big"),
    lambda: engine.read_batch([("big", 0, data)]),
    lambda: engine.write_batch([("file", 0, data)]),
):
    before = engine.stats()
    moved = before.bytes_written + before.bytes_read
    event_times.clear()
    ends_at_interrupt(call, lambda: (lambda now: now.bytes_written + now.bytes_read > moved)(engine.stats()))
    now = engine.stats()
    assert now.bytes_written + now.bytes_read - moved < SIZE
""",
    ),
    (READ_WRITE, "fork"): (
        CLOSED,
        """
in_child(lambda: [raises(errors.ClosedError, call) for call in (
    lambda: engine.write(b"x", "file"),
    lambda: engine.read(bytearray(1), "big"),
    lambda: engine.write_batch([("file", 0, b"x")]),
    lambda: engine.start_read_batch([("big", 0, bytearray(1))]),
)])
""",
    ),
    (READ_WRITE, "exit"): (
        HALF_WRITTEN,
        *(
            f"leave(lambda: {call}, started)"
            for call in (
                "engine.write(data, 'file')",
                "engine.read(data, 'big')",
                "engine.write_batch([('file', 0, data)])",
                "engine.read_batch([('big', 0, data)])",
            )
        ),
    ),
    (STRIPES, "close"): (
        FINISHED,
        "soon(engine.close, started)\nassert returns(lambda: engine.write(data[:PART], stripes)) == PART",
    ),
    (STRIPES, "Ctrl-C"): (
        LEFT,
        "ends_at_interrupt(lambda: engine.write(data, stripes), started)",
        """
engine.write(data[:PART * 4], stripes)
before = engine.stats().bytes_read
ends_at_interrupt(lambda: engine.read(data[:PART * 4], stripes), lambda: engine.stats().bytes_read > before)
""",
    ),
    (STRIPES, "fork"): (
        CLOSED,
        "in_child(lambda: raises(errors.ClosedError, lambda: engine.write(b'x', stripes)))",
    ),
    (STRIPES, "exit"): (
        HALF_WRITTEN,
        "leave(lambda: engine.write(data, stripes), started)",
    ),
    (WAIT, "cancel"): (
        "raises `CancelledError`",
        PENDING + "soon(pending.cancel, started)\nraises(errors.CancelledError, pending.result)",
    ),
    (WAIT, "timeout"): (
        "raises `WaitTimeoutError`; the transfer goes on",
        PENDING
        + "event_times.append(time.monotonic() + 0.1)\nraises(errors.WaitTimeoutError, lambda: pending.result(0.1))\n"
        + "assert not pending.done()",
    ),
    (WAIT, "close"): (FINISHED, SMALL + "soon(engine.close, started)\nassert returns(pending.result) == PART"),
    (WAIT, "Ctrl-C"): (
        GOES_ON,
        PENDING + "ends_at_interrupt(pending.result, started)\nassert not pending.done()",
    ),
    (WAIT, "fork"): (CLOSED, PENDING + "in_child(lambda: raises(errors.ClosedError, pending.result))"),
    (WAIT, "exit"): (
        FIRST,
        SMALL + "leave(pending.result, started)",
    ),
    (AWAIT, "cancel"): (
        "raises `CancelledError`",
        PENDING
        + AWAITING
        + "soon(pending.cancel, started)\nraises(errors.CancelledError, lambda: asyncio.run(main()))",
    ),
    (AWAIT, "timeout"): (
        "`asyncio.wait_for` raises `TimeoutError`; the transfer goes on",
        PENDING
        + """
async def waiting():
    return await pending
async def main():
    await asyncio.wait_for(waiting(), 0.1)
event_times.append(time.monotonic() + 0.1)
raises((TimeoutError, asyncio.TimeoutError), lambda: asyncio.run(main()))
assert not pending.done()
""",
    ),
    (AWAIT, "close"): (
        FINISHED,
        SMALL + AWAITING + "soon(engine.close, started)\nassert returns(lambda: asyncio.run(main())) == PART",
    ),
    (AWAIT, "Ctrl-C"): (
        GOES_ON,
        PENDING + AWAITING + "ends_at_interrupt(lambda: asyncio.run(main()), started)\nassert not pending.done()",
    ),
    (AWAIT, "fork"): (
        CLOSED,
        PENDING + AWAITING + "in_child(lambda: raises(errors.ClosedError, lambda: asyncio.run(main())))",
    ),
    (WITH, "cancel"): (
        "raises `CancelledError`",
        PENDING
        + "soon(pending.cancel, started)\nraises(errors.CancelledError, lambda: pending.__exit__(None, None, None))",
    ),
    (WITH, "close"): (
        FINISHED,
        SMALL + "soon(engine.close, started)\nreturns(lambda: pending.__exit__(None, None, None))",
    ),
    (WITH, "Ctrl-C"): (
        GOES_ON,
        PENDING
        + "ends_at_interrupt(lambda: pending.__exit__(None, None, None), started)\n"
        + "assert not pending.done()",
    ),
    (WITH, "fork"): (
        CLOSED,
        PENDING + "in_child(lambda: raises(errors.ClosedError, lambda: pending.__exit__(None, None, None)))",
    ),
    (WITH, "exit"): (FIRST, SMALL + "leave(lambda: pending.__exit__(None, None, None), started)"),
    (FILE_READ, "close"): (
        "returns its bytes; the next call raises `ClosedError`",
        """
reader = deepnvme.open("big", engine=engine)
soon(reader.close, started)
assert returns(lambda: reader.read(64 << 20)) == bytes(64 << 20)
raises(errors.ClosedError, lambda: reader.read(1))
raises(errors.ClosedError, lambda: reader.readinto(bytearray(1)))
""",
    ),
    (FILE_READ, "Ctrl-C"): (
        LEFT,
        """
reader = deepnvme.open("big", engine=engine)
ends_at_interrupt(reader.read, started)
assert engine.stats().bytes_read < SIZE
""",
        """
reader = deepnvme.open("big", engine=engine)
ends_at_interrupt(lambda: reader.readinto(data), started)
assert engine.stats().bytes_read < SIZE
""",
    ),
    (FILE_READ, "fork"): (
        CLOSED,
        """
reader = deepnvme.open("big", engine=engine)
in_child(lambda: [raises(errors.ClosedError, call) for call in (
    lambda: reader.read(1), lambda: reader.readinto(bytearray(1)))])
""",
    ),
    (FILE_READ, "exit"): (
        ENDS,
        "reader = deepnvme.open('big', engine=engine)\nleave(reader.read, started)",
        "reader = deepnvme.open('big', engine=engine)\nleave(lambda: reader.readinto(data), started)",
    ),
    (FILE_WRITE, "close"): (
        "raises `ClosedError`",
        WRITER + "soon(writer.close, started)\nraises(errors.ClosedError, lambda: writer.write(data))",
    ),
    (FILE_WRITE, "Ctrl-C"): (
        "raises; in a `with` block no file appears",
        """
def write():
    with deepnvme.open("new", "wb", engine=engine) as writer:
        writer.write(data)
ends_at_interrupt(write, started)
assert not os.path.exists("new")
""",
    ),
    (FILE_WRITE, "fork"): (
        CLOSED,
        WRITER + "in_child(lambda: raises(errors.ClosedError, lambda: writer.write(b'x')))\nwriter.close()",
    ),
    (FILE_WRITE, "exit"): (
        "the process ends; no file appears",
        WRITER + "leave(lambda: writer.write(data), started)\nassert not os.path.exists('new')",
    ),
    (FILE_CLOSE, "close"): (
        "the second call returns; the first makes the file",
        WRITER
        + """
writer.write(data[: 1 << 20])
threads = [threading.Thread(target=writer.close) for _ in range(2)]
event_times.append(time.monotonic())
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
check_time()
assert os.path.getsize("new") == 1 << 20
""",
    ),
    (FILE_CLOSE, "Ctrl-C"): (
        "raises; the file is whole or absent",
        WRITER
        + """
writer.write(data[:64 << 20])
try:
    soon(interrupt, at(0.01))
    writer.close()
    while not event_times:
        time.sleep(0.001)
    time.sleep(0.2)
except KeyboardInterrupt:
    pass
check_time()
assert not os.path.exists("new") or os.path.getsize("new") == 64 << 20
""",
    ),
    (FILE_CLOSE, "fork"): (
        CLOSED,
        WRITER
        + "writer.write(b'x')\nin_child(lambda: raises(errors.ClosedError, writer.close))\n"
        + "writer.close()\nassert os.path.getsize('new') == 1",
    ),
    (FILE_CLOSE, "exit"): (
        "the process ends; the file is whole or absent",
        WRITER + "writer.write(data[:64 << 20])\nleave(writer.close, started)",
    ),
    (CLOSE, "close"): (
        "the second call returns; the first finishes all",
        SMALL + MOVES + "soon(engine.close, moves)\nreturns(engine.close)\nassert returns(pending.result) == PART",
    ),
    (CLOSE, "Ctrl-C"): (
        "raises; the engine goes on closing",
        PENDING
        + MOVES
        + "ends_at_interrupt(engine.close, moves)\n"
        + "raises(errors.ClosedError, lambda: engine.write(b'x', 'other'))\nassert not pending.done()",
    ),
    (CLOSE, "fork"): ("returns, and does nothing", PENDING + "in_child(lambda: returns(engine.close))"),
    (CLOSE, "exit"): (FIRST, SMALL + MOVES + "leave(engine.close, moves)"),
}
