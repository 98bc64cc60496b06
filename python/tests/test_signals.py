"""Ctrl-C and other signals while waiting."""

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

SLOW = """
    import os, signal, sys, threading, time
    import deepnvme
    SIZE = 1 << 30
    engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)

    def interrupt_when_writing():
        while engine.stats().bytes_written == 0:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_writing)
"""


@pytest.mark.parametrize(
    "call",
    [
        'engine.write(source, "file")',
        'engine.write_batch([("file", 0, source)])',
        'engine.start_write(source, "file").wait()',
        'engine.start_write(source, "file").wait(1000)',
        'engine.start_write(source, "file").__enter__().__exit__(None, None, None)',
    ],
)
def test_ctrl_c_arrives_while_waiting(python: Run, call: str) -> None:
    python(f"""{SLOW}
    source = bytearray(SIZE)
    thread.start()
    try:
        {call}
    except KeyboardInterrupt:
        pass
    else:
        raise SystemExit("no interrupt")
    assert engine.stats().bytes_written < SIZE
    os._exit(0)
    """)


def test_after_ctrl_c_nothing_touches_the_tensor(python: Run) -> None:
    python(f"""{SLOW}
    source = bytearray(SIZE)
    thread.start()
    try:
        engine.write(source, "file")
    except KeyboardInterrupt:
        pass
    before = engine.stats().bytes_written
    source.clear()
    assert engine.write(b"12345", "other") == 5, "the engine goes on"
    assert engine.stats().bytes_written == before + 5, "the rest was given up"
    """)


def test_a_handler_that_raises_ends_the_wait(python: Run) -> None:
    python(f"""{SLOW}
    def handler(number, frame):
        raise RuntimeError("mine")

    signal.signal(signal.SIGINT, handler)
    pending = engine.start_write(bytearray(SIZE), "file")
    try:
        thread.start()
        pending.wait()
    except RuntimeError as error:
        assert str(error) == "mine"
    assert not pending.done(), "started requests go on"
    assert pending.cancel()
    try:
        pending.wait()
    except deepnvme.errors.CancelledError:
        pass
    """)


def test_a_handler_that_returns_does_not(python: Run) -> None:
    python("""
        import signal
        import deepnvme
        seen = []
        signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
        while len(seen) < 5:
            assert engine.write(bytes(8 << 20), "file") == 8 << 20
        signal.setitimer(signal.ITIMER_REAL, 0)
    """)
