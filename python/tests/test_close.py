"""Engines that are closed or dropped while they work: all of it is finished, and no other thread stands still."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

SETUP = """
    import gc, os, sys, threading, time
    import deepnvme
    SIZE = 64 << 20
    longest = 0.0
    over = threading.Event()

    def beat():
        # The longest time that this thread, which needs nothing but the interpreter, was kept from it.
        global longest
        last = time.monotonic()
        while not over.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    def slow():
        return deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)

    engine = slow()
    data = bytes(SIZE)
    begin = time.monotonic()
    engine.write(data, "calibration")
    took = time.monotonic() - begin
    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
"""

END = """
    over.set()
    heart.join()
    assert longest < max(0.25, took / 3), (longest, took)
    os._exit(0)
"""


def test_close_waits_for_a_write_of_another_thread(python: Run, tmp_path: Path) -> None:
    python(f"""{SETUP}
    writes = [threading.Thread(target=engine.write, args=(data, f"file-{{n}}")) for n in range(2)]
    for write in writes:
        write.start()
    while not all(os.path.exists(f"file-{{n}}") and os.path.getsize(f"file-{{n}}") for n in range(2)):
        time.sleep(0.001)
    engine.close()
    assert [os.path.getsize(f"file-{{n}}") for n in range(2)] == [SIZE] * 2
    with open("file-0", "rb") as file:
        assert file.read() == data
    for write in writes:
        write.join(1)
        assert not write.is_alive()
    {END}""")


@pytest.mark.parametrize(
    "drop",
    [
        "del engine",
        "engine.close()",
        "writer = deepnvme.open('new', 'wb', engine=engine); writer.write(data); del engine; del writer",
        "reader = deepnvme.open('calibration', engine=engine); reader.read(4096); del engine; del reader",
    ],
)
def test_nothing_is_dropped_under_the_lock_of_the_interpreter(python: Run, drop: str) -> None:
    python(f"""{SETUP}
    import warnings
    warnings.simplefilter("ignore")
    before = engine.stats().bytes_written
    pending = engine.start_write(data, "file")
    while engine.stats().bytes_written == before:
        time.sleep(0.001)
    {drop}
    gc.collect()
    assert pending.result() == SIZE
    {END}""")


def test_the_last_reference_of_a_closed_engine_costs_nothing(python: Run) -> None:
    """A thread that is inside a call when ``close`` comes has the last reference to the engine."""
    python(f"""{SETUP}
    failures = []

    def write_on():
        try:
            for n in range(1000):
                engine.write(data[:SIZE // 4], "file")
        except deepnvme.errors.ClosedError:
            return
        except BaseException as error:
            failures.append(error)

    writes = [threading.Thread(target=write_on) for _ in range(3)]
    for write in writes:
        write.start()
    time.sleep(0.05)
    engine.close()
    for write in writes:
        write.join(5)
        assert not write.is_alive()
    assert not failures, failures
    {END}""")
