"""Ctrl-C and other signals while waiting."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
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
        'engine.start_write(source, "file").result()',
        'engine.start_write(source, "file").result(1000)',
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
        pending.result()
    except RuntimeError as error:
        assert str(error) == "mine"
    assert not pending.done(), "started requests go on"
    assert pending.cancel()
    try:
        pending.result()
    except deepnvme.errors.CancelledError:
        pass
    """)


def test_no_interrupt_is_lost_after_a_read(python: Run) -> None:
    """What follows the transfer, such as telling torch that the tensor has changed, must not handle a signal."""
    python("""
        import random, signal, torch
        import deepnvme
        tensor = torch.ones(4096)
        deepnvme.write(tensor, "file")
        seen = []
        def handle(*_):
            seen.append(1)
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, handle)
        file = deepnvme.open("file")
        def readinto():
            file.seek(0)
            file.readinto(tensor)
        ways = [lambda: deepnvme.read(tensor, "file"), lambda: deepnvme.start_read(tensor, "file").result(), readinto]
        for way in ways:
            way()
            for _ in range(300):
                seen.clear()
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + random.random() * 1e-3)
                    while not seen:
                        way()
                    raise AssertionError("an interrupt was lost")
                except KeyboardInterrupt:
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


def test_ctrl_c_arrives_while_a_file_is_closed(python: Run) -> None:
    python("""
        import os, signal, threading, time
        import deepnvme

        # Slow enough that most of it is still to be written when close begins.
        engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
        data = os.urandom(12 << 20)

        def close_is_interrupted():
            file = deepnvme.open("file", "wb", engine=engine)
            file.write(data)
            began = threading.Event()

            def interrupt():
                began.wait()
                time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            try:
                began.set()
                file.close()
                thread.join()
                time.sleep(0.1)
            except KeyboardInterrupt:
                thread.join()
                assert file.closed
                return True
            return False

        # A machine with a very fast disk may close the file before the signal comes.
        for attempt in range(20):
            before = engine.stats().bytes_written
            if close_is_interrupted() and not os.path.exists("file"):
                break
            assert open("file", "rb").read() == data, "half a file"
            os.remove("file")
        for _ in range(100):
            if not os.listdir("."):
                break
            time.sleep(0.05)
        assert os.listdir(".") in ([], ["file"]), os.listdir(".")
        with deepnvme.open("file", "wb", engine=engine) as file:
            file.write(b"the engine goes on")
        assert open("file", "rb").read() == b"the engine goes on"
    """)


def test_ctrl_c_at_exit_gives_up(tmp_path: Path) -> None:
    program = f"""{SLOW}
    import atexit
    pending = engine.start_write(bytearray(SIZE), "file")
    atexit.register(lambda: print("leaving", flush=True))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=100)
    assert process.returncode == 0, words
    assert "KeyboardInterrupt" in words
