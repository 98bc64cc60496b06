"""Every call that waits, against all that can come while it does; ``docs/blocking-calls.md`` has the same table."""

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "blocking-calls.md"

# What a cell may take from the moment at which something comes, and how often a busy machine may miss that.
LIMIT_S = 1.0
ATTEMPTS = 5
TOO_SLOW = 75

SETUP = f"""
import atexit, asyncio, os, signal, sys, threading, time, warnings
# Called after what the package does at exit, which registers itself later.
atexit.register(lambda: print(time.time(), flush=True))
import deepnvme
from deepnvme import errors
warnings.simplefilter("ignore")
SIZE = 1 << 30
PART = 8 << 20
engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
with open("big", "wb") as big:
    big.truncate(SIZE)
data = bytearray(SIZE)
stripes = deepnvme.StripeSet(["part-0", "part-1"])
came = []

def started():
    stats = engine.stats()
    return stats.bytes_written + stats.bytes_read > 0

def soon(act, is_time=started):
    is_begun = threading.Event()
    def wait():
        # An interrupt must not come while the thread is being started.
        is_begun.wait()
        while not is_time():
            time.sleep(0.001)
        came.append(time.monotonic())
        act()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    is_begun.set()

def in_time():
    if time.monotonic() - came[0] > {LIMIT_S}:
        os._exit({TOO_SLOW})

def raises(error, call):
    try:
        call()
    except error:
        if came:
            in_time()
    else:
        raise SystemExit(f"{{error.__name__}} was not raised")

def returns(call):
    answer = call()
    while not came:
        time.sleep(0.001)
    in_time()
    return answer

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        came.append(time.monotonic())
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def leave(call):
    "Ends the interpreter while a thread is in the call."
    threading.Thread(target=call, daemon=True).start()
    while not started():
        time.sleep(0.001)
    print(time.time(), flush=True)
"""

READ_WRITE = "`read`, `write` and their batches"
STRIPES = "the same with a `StripeSet`"
WAIT = "`Pending.wait`"
AWAIT = "`await pending`"
WITH = "`with pending:`"
FILE_READ = "`file.read`, `file.readinto`"
FILE_WRITE = "`file.write`"
FILE_CLOSE = "`file.close` after writing"
CLOSE = "`Engine.close`"
HANDLE = "`aio_handle.wait`"
ROWS = (READ_WRITE, STRIPES, WAIT, AWAIT, WITH, FILE_READ, FILE_WRITE, FILE_CLOSE, CLOSE, HANDLE)
COLUMNS = ("cancel", "timeout", "close", "Ctrl-C", "fork", "exit")

PENDING = "pending = engine.start_write(data, 'file')\n"
SMALL = "pending = engine.start_write(data[:PART], 'file')\n"
# A closed engine has no figures.
MOVES = "moves = lambda: pending.progress().bytes_done > 0\n"
WRITER = "writer = deepnvme.open('new', 'wb', engine=engine)\n"
AWAITING = """
async def main():
    return await pending
"""
# Its engine is its own, and the bytes are there when it has begun.
AIO = """
import torch
from deepnvme.deepspeed import aio_handle
tensor = torch.zeros(SIZE, dtype=torch.uint8)
handle = aio_handle(4096, 1, False, False, 1)
def started():
    return os.path.exists("aio") and os.stat("aio").st_blocks > 0
"""

FINISHED = "is finished, and returns"
LEFT = "raises; gives up what has not begun"
GOES_ON = "raises; the transfer goes on"
CHILD = "raises `ClosedError`"
FIRST = "is finished first"

# By row and column: what is documented, and a program that shows it.
CELLS: dict[tuple[str, str], tuple[str, str]] = {
    (READ_WRITE, "close"): (
        FINISHED,
        "soon(engine.close)\nassert returns(lambda: engine.write(data[:PART], 'file')) == PART",
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
    came.clear()
    soon(interrupt, lambda: (lambda now: now.bytes_written + now.bytes_read > moved)(engine.stats()))
    raises(KeyboardInterrupt, call)
    now = engine.stats()
    assert now.bytes_written + now.bytes_read - moved < SIZE
""",
    ),
    (READ_WRITE, "fork"): (
        CHILD,
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
        "the process ends; a write may be half done",
        "leave(lambda: engine.write(data, 'file'))",
    ),
    (STRIPES, "close"): (
        FINISHED,
        "soon(engine.close)\nassert returns(lambda: engine.write(data[:PART], stripes)) == PART",
    ),
    (STRIPES, "Ctrl-C"): (LEFT, "soon(interrupt)\nraises(KeyboardInterrupt, lambda: engine.write(data, stripes))"),
    (STRIPES, "fork"): (
        CHILD,
        "in_child(lambda: raises(errors.ClosedError, lambda: engine.write(b'x', stripes)))",
    ),
    (STRIPES, "exit"): (
        "the process ends; a write may be half done",
        "leave(lambda: engine.write(data, stripes))",
    ),
    (WAIT, "cancel"): (
        "raises `CancelledError`",
        PENDING + "soon(pending.cancel)\nraises(errors.CancelledError, pending.wait)",
    ),
    (WAIT, "timeout"): (
        "raises `WaitTimeoutError`; the transfer goes on",
        PENDING
        + "came.append(time.monotonic() + 0.1)\nraises(errors.WaitTimeoutError, lambda: pending.wait(0.1))\n"
        + "assert not pending.done()",
    ),
    (WAIT, "close"): (FINISHED, SMALL + "soon(engine.close)\nassert returns(pending.wait) == PART"),
    (WAIT, "Ctrl-C"): (
        GOES_ON,
        PENDING + "soon(interrupt)\nraises(KeyboardInterrupt, pending.wait)\nassert not pending.done()",
    ),
    (WAIT, "fork"): (CHILD, PENDING + "in_child(lambda: raises(errors.ClosedError, pending.wait))"),
    (WAIT, "exit"): (
        FIRST,
        SMALL + "leave(pending.wait)",
    ),
    (AWAIT, "cancel"): (
        "raises `CancelledError`",
        PENDING + AWAITING + "soon(pending.cancel)\nraises(errors.CancelledError, lambda: asyncio.run(main()))",
    ),
    (AWAIT, "timeout"): (
        "`asyncio.wait_for` raises `TimeoutError`; the transfer goes on",
        PENDING
        + """
async def waiting():
    return await pending
async def main():
    await asyncio.wait_for(waiting(), 0.1)
came.append(time.monotonic() + 0.1)
raises((TimeoutError, asyncio.TimeoutError), lambda: asyncio.run(main()))
assert not pending.done()
""",
    ),
    (AWAIT, "close"): (
        FINISHED,
        SMALL + AWAITING + "soon(engine.close)\nassert returns(lambda: asyncio.run(main())) == PART",
    ),
    (AWAIT, "Ctrl-C"): (
        GOES_ON,
        PENDING
        + AWAITING
        + "soon(interrupt)\nraises(KeyboardInterrupt, lambda: asyncio.run(main()))\nassert not pending.done()",
    ),
    (AWAIT, "fork"): (
        CHILD,
        PENDING + AWAITING + "in_child(lambda: raises(errors.ClosedError, lambda: asyncio.run(main())))",
    ),
    (WITH, "cancel"): (
        "raises `CancelledError`",
        PENDING + "soon(pending.cancel)\nraises(errors.CancelledError, lambda: pending.__exit__(None, None, None))",
    ),
    (WITH, "close"): (FINISHED, SMALL + "soon(engine.close)\nreturns(lambda: pending.__exit__(None, None, None))"),
    (WITH, "Ctrl-C"): (
        GOES_ON,
        PENDING
        + "soon(interrupt)\nraises(KeyboardInterrupt, lambda: pending.__exit__(None, None, None))\n"
        + "assert not pending.done()",
    ),
    (WITH, "fork"): (
        CHILD,
        PENDING + "in_child(lambda: raises(errors.ClosedError, lambda: pending.__exit__(None, None, None)))",
    ),
    (WITH, "exit"): (FIRST, SMALL + "leave(lambda: pending.__exit__(None, None, None))"),
    (FILE_READ, "close"): (
        "returns its bytes; the next call raises `ValueError`",
        """
reader = deepnvme.open("big", engine=engine)
soon(reader.close)
assert returns(lambda: reader.read(64 << 20)) == bytes(64 << 20)
raises(ValueError, lambda: reader.read(1))
raises(ValueError, lambda: reader.readinto(bytearray(1)))
""",
    ),
    (FILE_READ, "Ctrl-C"): (
        LEFT,
        """
reader = deepnvme.open("big", engine=engine)
soon(interrupt)
raises(KeyboardInterrupt, reader.read)
assert engine.stats().bytes_read < SIZE
""",
    ),
    (FILE_READ, "fork"): (
        CHILD,
        """
reader = deepnvme.open("big", engine=engine)
in_child(lambda: [raises(errors.ClosedError, call) for call in (
    lambda: reader.read(1), lambda: reader.readinto(bytearray(1)))])
""",
    ),
    (FILE_READ, "exit"): ("the process ends", "reader = deepnvme.open('big', engine=engine)\nleave(reader.read)"),
    (FILE_WRITE, "close"): (
        "raises `ValueError`",
        WRITER + "soon(writer.close)\nraises(ValueError, lambda: writer.write(data))",
    ),
    (FILE_WRITE, "Ctrl-C"): (
        "raises; in a `with` block no file appears",
        """
def write():
    with deepnvme.open("new", "wb", engine=engine) as writer:
        writer.write(data)
soon(interrupt)
raises(KeyboardInterrupt, write)
assert not os.path.exists("new")
""",
    ),
    (FILE_WRITE, "fork"): (
        CHILD,
        WRITER + "in_child(lambda: raises(errors.ClosedError, lambda: writer.write(b'x')))\nwriter.close()",
    ),
    (FILE_WRITE, "exit"): (
        "the process ends; no file appears",
        WRITER + "leave(lambda: writer.write(data))\nassert not os.path.exists('new')",
    ),
    (FILE_CLOSE, "close"): (
        "the second call returns; the first makes the file",
        WRITER
        + """
writer.write(data[: 1 << 20])
threads = [threading.Thread(target=writer.close) for _ in range(2)]
came.append(time.monotonic())
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
in_time()
assert os.path.getsize("new") == 1 << 20
""",
    ),
    (FILE_CLOSE, "Ctrl-C"): (
        "raises; the file is whole or absent",
        WRITER
        + """
writer.write(data[:64 << 20])
came.append(time.monotonic())
threading.Timer(0.01, interrupt).start()
try:
    writer.close()
    time.sleep(0.2)
except KeyboardInterrupt:
    pass
in_time()
assert not os.path.exists("new") or os.path.getsize("new") == 64 << 20
""",
    ),
    (FILE_CLOSE, "fork"): (
        CHILD,
        WRITER
        + "writer.write(b'x')\nin_child(lambda: raises(errors.ClosedError, writer.close))\n"
        + "writer.close()\nassert os.path.getsize('new') == 1",
    ),
    (FILE_CLOSE, "exit"): (
        "the process ends; the file is whole or absent",
        WRITER + "writer.write(data[:64 << 20])\nleave(writer.close)",
    ),
    (CLOSE, "close"): (
        "the second call returns; the first finishes all",
        SMALL + MOVES + "soon(engine.close, moves)\nreturns(engine.close)\nassert returns(pending.wait) == PART",
    ),
    (CLOSE, "Ctrl-C"): (
        "raises; the engine goes on closing",
        PENDING
        + MOVES
        + "soon(interrupt, moves)\nraises(KeyboardInterrupt, engine.close)\n"
        + "raises(errors.ClosedError, lambda: engine.write(b'x', 'other'))\nassert not pending.done()",
    ),
    (CLOSE, "fork"): ("returns, and does nothing", PENDING + "in_child(lambda: returns(engine.close))"),
    (CLOSE, "exit"): (FIRST, SMALL + MOVES + "started = moves\nleave(engine.close)"),
    (HANDLE, "Ctrl-C"): (
        "raises; nothing is counted, and the transfers go on",
        AIO
        + "handle.async_pwrite(tensor, 'aio')\nsoon(interrupt, started)\n"
        + "raises(KeyboardInterrupt, handle.wait)\nos._exit(0)",
    ),
    (HANDLE, "fork"): (
        "raises `RuntimeError`",
        AIO
        + "handle.async_pwrite(tensor[:PART], 'aio')\n"
        + "in_child(lambda: raises(RuntimeError, handle.wait))\nhandle.wait()",
    ),
    (HANDLE, "exit"): (FIRST, AIO + "handle.async_pwrite(tensor[:PART], 'aio')\nleave(handle.wait)"),
}


def table() -> dict[tuple[str, str], str]:
    """Read the first table of the document."""
    lines = [line for line in DOCUMENT.read_text().split("\n## ")[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(rows[0][1:]) == COLUMNS
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(COLUMNS, row[1:], strict=True)}


def test_the_document_and_the_tests_have_one_table() -> None:
    documented = table()
    assert {row for row, _ in documented} == set(ROWS)
    tested = {cell: result for cell, result in documented.items() if not re.match(r"— \w+", result)}
    assert tested == {cell: result for cell, (result, _) in CELLS.items()}


@pytest.mark.parametrize(("row", "column"), CELLS, ids=lambda name: name.replace("`", "").replace(" ", "-"))
def test_a_call_that_waits_ends_in_time(row: str, column: str, tmp_path: Path) -> None:
    if row == HANDLE:
        pytest.importorskip("torch")
    result, program = CELLS[row, column]
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        # What goes on would be finished at exit, which is another cell.
        end = "" if column == "exit" else "\nos._exit(0)\n"
        command = [sys.executable, "-c", SETUP + textwrap.dedent(program) + end]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        late = ended.returncode == TOO_SLOW
        if column == "exit" and ended.returncode == 0:
            left, over = map(float, ended.stdout.split())
            # torch takes its time to be unloaded, which is none of ours.
            late = (over if row == HANDLE else time.time()) - left > LIMIT_S
            if result == FIRST and not late:
                name = "aio" if row == HANDLE else "file"
                assert (folder / name).stat().st_size == 8 << 20
            if row == FILE_WRITE:
                assert not (folder / "new").exists()
            if row == FILE_CLOSE and (folder / "new").exists():
                assert (folder / "new").stat().st_size == 64 << 20
        if not late:
            assert ended.returncode == 0, f"{result}: status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
            return
    pytest.fail(f"{row} against {column} took longer than {LIMIT_S} s, {ATTEMPTS} times")
