"""Swappers during close, Ctrl-C, fork and exit."""

from .results import CLOSED, ENDS, GIVEN_UP, Cells

SWAPPER = """
swapper = deepnvme.Swapper(".", memory=8 << 20)
for key in "ab":
    swapper.put(key, torch.full((2 << 20,), ord(key), dtype=torch.float32)[: (2 << 20) - 5000])
def hold():
    with swapper.borrow("a"):
        held.set()
        go_on.wait()
held, go_on = threading.Event(), threading.Event()
holder = threading.Thread(target=hold, daemon=True)
holder.start()
held.wait()
"""
# Tensors on disk, each too large to be read, written or copied before the event comes.
LARGE = """
SIZE = 128 << 20
swapper = deepnvme.Swapper(".", memory=SIZE + (1 << 20))
with open("large", "wb") as file:
    file.truncate(SIZE)
source = os.open("large", os.O_RDONLY)
swapper.attach("attached", "large", 0, SIZE)
swapper.import_("b", source, 0, SIZE)
in_memory = os.memfd_create("target")
def arrives():
    return os.fstat(in_memory).st_size > 0
def partly_exported():
    assert 0 < os.fstat(in_memory).st_size < SIZE
before = bytes_moved()
moves = busy()
"""
# Its last bytes are there as well, so that a copy cannot fail.
FILLED = LARGE + "os.truncate(in_memory, SIZE)\nfree = swapper.stats().stored_bytes\n"

BORROW, FLUSH, SWAP_CLOSE = "`Swapper.borrow`, `create`, `put`, `read`, `write`", "`Swapper.flush`", "`Swapper.close`"
MAKE = "making a `Swapper`, `pinned_empty`"
FILES = "`Swapper.attach`, `import_`, `export`, `extents`"
ROWS = (MAKE, BORROW, FILES, FLUSH, SWAP_CLOSE)

# Calls that wait for memory, and calls that wait for the disk.
WAITING = ("swapper.create('c', (1 << 20,), torch.float32).__enter__()", "swapper.put('d', torch.ones(1 << 20))")
MOVING = (
    "swapper.read('attached', 0, torch.empty(SIZE // 4))",
    "swapper.write('b', 0, torch.empty(SIZE // 4))",
)
IS_USABLE = """
assert swapper.read("attached", SIZE - 4, torch.ones(1)) == 0
assert swapper.import_("b", source, 0, SIZE)
swapper.close()
"""
# The kernel takes a second to provide this memory and lock it.
MAKING = ("deepnvme.Swapper('.', memory=3 << 30)", "deepnvme.pinned_empty(3 << 30, dtype=torch.uint8)")
MAKING_LITTLE = tuple(call.replace("3 << 30", "1 << 20") for call in MAKING)
GAVE_UP = "\nassert bytes_moved() - before < SIZE"
# Copies through memory. Those of the kernel may be over before an event comes, and are tested in Rust.
EXPORT = "swapper.export('attached', in_memory)"
IMPORT = "swapper.import_('new', in_memory, 0, SIZE)"
PART_EXPORTED = "\nassert 0 < os.fstat(in_memory).st_size < SIZE"
# A file and a held tensor.
HELD = SWAPPER + "open('file', 'wb').write(bytes(4096))\n"
DIRTY = "swapper = deepnvme.Swapper('.', memory=64 << 20)\nswapper.put('a', torch.ones(12 << 20))\n"

CELLS: Cells = {
    (MAKE, "Ctrl-C"): (
        "raises; the memory goes back once the kernel has provided it",
        *(f"ends_at_interrupt(lambda: [{call} for _ in range(100)], at(0.05))" for call in MAKING),
    ),
    (MAKE, "fork"): (
        "makes it, with an engine of its own",
        "deepnvme.default_engine()\n" + "".join(f"in_child(lambda: {call})\n" for call in MAKING_LITTLE),
    ),
    (MAKE, "exit"): (ENDS, *(f"leave(lambda: {call}, at(0.05))" for call in MAKING)),
    (BORROW, "close"): (
        CLOSED,
        SWAPPER
        + """
ends_at_close(lambda: swapper.borrow("b").__enter__(), swapper.close, at(0.1))
for call in (
    lambda: swapper.create("c", (1 << 20,), torch.float32).__enter__(),
    lambda: swapper.put("d", torch.ones(1 << 20)),
    lambda: swapper.read("b", 0, torch.empty(10)),
    lambda: swapper.write("b", 0, torch.empty(10)),
):
    raises(errors.ClosedError, call)
go_on.set()
holder.join(20)
""",
        *(SWAPPER + f"soon(swapper.close, at(0.1))\nraises(errors.ClosedError, lambda: {call})" for call in WAITING),
        *(
            LARGE + f"soon(swapper.close, moves)\nraises(errors.ClosedError, lambda: {call})" + GAVE_UP
            for call in MOVING
        ),
    ),
    (BORROW, "Ctrl-C"): (
        "raises; nothing is borrowed, and nothing is put",
        SWAPPER
        + """
for call in (
    lambda: swapper.borrow("b").__enter__(),
    lambda: swapper.create("c", (1 << 20,), torch.float32).__enter__(),
    lambda: swapper.put("d", torch.ones(1 << 20)),
):
    event_times.clear()
    ends_at_interrupt(call, at(0.1))
assert set(swapper.keys()) == {"a", "b"}
go_on.set()
holder.join(20)
with swapper.borrow("b") as borrowed:
    assert borrowed.eq(ord("b")).all()
swapper.close()
""",
        *(LARGE + f"ends_at_interrupt(lambda: {call}, moves)" + GAVE_UP + IS_USABLE for call in MOVING),
    ),
    (BORROW, "fork"): (
        CLOSED,
        SWAPPER
        + """
in_child(lambda: [raises(errors.ClosedError, call) for call in (
    lambda: swapper.borrow("b").__enter__(),
    lambda: swapper.create("c", (1 << 20,), torch.float32).__enter__(),
    lambda: swapper.put("d", torch.ones(1 << 20)),
    lambda: swapper.read("b", 0, torch.empty(10)),
    lambda: swapper.write("b", 0, torch.empty(10)),
)])
go_on.set()
""",
    ),
    (BORROW, "exit"): (
        GIVEN_UP,
        *(SWAPPER + f"leave_closed(lambda: {call}, at(0.1))" for call in ("swapper.borrow('b').__enter__()", *WAITING)),
        *(LARGE + f"leave_closed(lambda: {call}, moves)" for call in MOVING),
    ),
    (FILES, "close"): (
        "raises `ClosedError`; `export` leaves part of its bytes",
        HELD + "soon(swapper.close, at(0.1))\nraises(errors.ClosedError, lambda: swapper.attach('a', 'file', 0, 4096))",
        DIRTY + "soon(swapper.close, busy())\nraises(errors.ClosedError, lambda: swapper.extents('a'))",
        DIRTY + "soon(swapper.close, busy())\nraises(errors.ClosedError, lambda: swapper.export('a', 1, 1 << 20))",
        LARGE + f"soon(swapper.close, arrives)\nraises(errors.ClosedError, lambda: {EXPORT})" + PART_EXPORTED,
        FILLED + f"soon(swapper.close, busy())\nraises(errors.ClosedError, lambda: {IMPORT})",
    ),
    (FILES, "Ctrl-C"): (
        "raises; nothing is attached or imported, unless that was complete already; `export` leaves part of its bytes",
        HELD
        + """
ends_at_interrupt(lambda: swapper.attach("a", "file", 0, 4096), at(0.1))
go_on.set()
holder.join(20)
with swapper.borrow("a") as borrowed:
    assert borrowed.eq(ord("a")).all()
swapper.attach("a", "file", 0, 4096)
assert swapper.read("a", 0, torch.ones(1024)).eq(0).all()
swapper.close()
""",
        DIRTY
        + """
ends_at_interrupt(lambda: swapper.extents("a"))
assert swapper.extents("a")[0][3] == 48 << 20
""",
        LARGE + f"ends_at_interrupt(lambda: {EXPORT}, arrives)" + PART_EXPORTED + IS_USABLE,
        FILLED
        + f"ends_at_interrupt(lambda: {IMPORT})\n"
        + "assert set(swapper.keys()) == {'attached', 'b'}\nassert swapper.stats().stored_bytes == free"
        + IS_USABLE,
        LARGE
        + """
checked = deepnvme.Swapper(".", memory=SIZE + (1 << 20), checksums=True)
moves = busy()
ends_at_interrupt(lambda: checked.import_("new", source, 0, SIZE), moves)
assert not checked.keys()
""",
    ),
    (FILES, "fork"): (
        CLOSED,
        HELD
        + """
source = os.open("file", os.O_RDWR)
in_child(lambda: [raises(errors.ClosedError, call) for call in (
    lambda: swapper.attach("c", "file", 0, 4096),
    lambda: swapper.import_("c", source, 0, 4096),
    lambda: swapper.export("b", source),
    lambda: swapper.extents("b"),
)])
go_on.set()
assert os.path.getsize("file") == 4096
""",
    ),
    (FILES, "exit"): (
        "raises `ClosedError` in its thread; `export` leaves part of its bytes",
        HELD + "leave_closed(lambda: swapper.attach('a', 'file', 0, 4096), at(0.1))",
        DIRTY + "leave_closed(lambda: swapper.extents('a'), busy())",
        LARGE + f"leave_closed(lambda: {EXPORT}, arrives)\nexit_checks.append(partly_exported)",
        FILLED + f"leave_closed(lambda: {IMPORT}, busy())",
    ),
    (FLUSH, "close"): (
        CLOSED,
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(12 << 20))
ends_at_close(swapper.flush, swapper.close)
""",
    ),
    (FLUSH, "Ctrl-C"): (
        "raises; the writing goes on",
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(12 << 20))
ends_at_interrupt(swapper.flush)
swapper.flush()
swapper.close()
""",
    ),
    (FLUSH, "fork"): (
        CLOSED,
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(1 << 20))
in_child(lambda: raises(errors.ClosedError, swapper.flush))
swapper.close()
""",
    ),
    (FLUSH, "exit"): (
        GIVEN_UP,
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(12 << 20))
leave_closed(swapper.flush, busy())
""",
    ),
    (SWAP_CLOSE, "close"): (
        "both return",
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(12 << 20))
moves = busy()
threading.Thread(target=swapper.flush, daemon=True).start()
both_close(swapper.close, moves)
""",
    ),
    (SWAP_CLOSE, "Ctrl-C"): (
        "raises once the op in progress has ended; the swapper is closed",
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(12 << 20))
run_until_moving(swapper.flush)
interrupted_close(swapper.close)
swapper.close()
raises(errors.ClosedError, swapper.flush)
""",
    ),
    (SWAP_CLOSE, "fork"): (
        "returns, and does nothing",
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(1 << 20))
in_child(lambda: returns(swapper.close))
with swapper.borrow("a") as borrowed:
    assert borrowed.eq(1).all()
""",
    ),
    (SWAP_CLOSE, "exit"): (
        ENDS,
        """
swapper = deepnvme.Swapper(".", memory=64 << 20)
swapper.put("a", torch.ones(12 << 20))
leave(swapper.close, at(0))
""",
    ),
}
