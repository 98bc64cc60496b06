"""Signals, forks, and the end of the interpreter."""

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
    thread.start()
    pending = engine.start_write(bytearray(SIZE), "file")
    try:
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
    """)


FORK = """
    import os, sys, threading
    import deepnvme

    def in_child(work):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except BaseException as error:
                print("in the child:", type(error).__name__, error, flush=True)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
"""


def test_the_child_of_a_fork_has_a_fresh_default_engine(python: Run) -> None:
    python(f"""{FORK}
    deepnvme.write(b"parent", "file")
    before = deepnvme.default_engine()

    def work():
        assert deepnvme.default_engine() is not before
        target = bytearray(6)
        assert deepnvme.read(target, "file") == 6 and target == b"parent"
        deepnvme.start_write(b"child!", "other").wait()
        with deepnvme.open("third", "wb") as file:
            file.write(b"x" * 10_000_000)
        in_child(lambda: deepnvme.write(b"grand", "grandchild"))

    in_child(work)
    target = bytearray(6)
    deepnvme.read(target, "other")
    assert target == b"child!"
    assert deepnvme.default_engine() is before
    """)


def test_what_was_made_before_the_fork_raises_in_the_child(python: Run) -> None:
    python(f"""{FORK}
    engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
    pending = engine.start_write(bytes(64 << 20), "file")
    writer = deepnvme.open("new", "wb", engine=engine)
    writer.write(b"x" * 20_000_000)
    engine.write(b"12345", "short")
    reader = deepnvme.open("short", engine=engine)
    names = sorted(os.listdir())

    def work():
        calls = [
            lambda: engine.write(b"x", "other"),
            lambda: engine.start_read(bytearray(1), "file"),
            lambda: deepnvme.open("short", engine=engine).read(),
            lambda: writer.write(b"y"),
            lambda: writer.close(),
            lambda: reader.read(),
            lambda: pending.wait(),
            lambda: pending.wait(5),
        ]
        for index, call in enumerate(calls):
            try:
                call()
            except deepnvme.errors.ClosedError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError(f"call {{index}} did not raise")
        assert pending.done() and not pending.cancel()
        repr(pending), repr(engine), pending.progress()
        engine.close()

    in_child(work)

    def drop():
        global engine, pending, writer, reader
        import gc, warnings
        warnings.simplefilter("ignore")
        del engine, pending, writer, reader
        gc.collect()
        assert [name for name in names if not os.path.exists(name)] == [], "the parent's temporary is not the child's"

    in_child(drop)
    writer.close()
    assert os.path.getsize("new") == 20_000_000
    assert pending.wait() == 64 << 20
    assert reader.read() == b"12345"
    """)


def test_the_child_exits_in_the_ordinary_way(python: Run) -> None:
    ended = python("""
        import os, sys
        import deepnvme
        engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
        pending = engine.start_write(bytes(32 << 20), "file")
        forgotten = engine.start_write(bytes(4 << 20), "forgotten")
        del forgotten
        deepnvme.start_write(b"x", "default")
        pid = os.fork()
        if pid == 0:
            print("child", flush=True)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert pending.wait() == 32 << 20
        print("parent")
    """)
    assert ended.stdout.split() == ["child", "parent"]


def test_forks_while_other_threads_do_io(python: Run) -> None:
    python(f"""{FORK}
    stop = False
    deepnvme.write(bytes(1 << 20), "file")

    def traffic(index):
        target = bytearray(1 << 20)
        while not stop:
            deepnvme.start_read(target, "file").wait()
            deepnvme.start_write(target, f"file{{index}}")

    threads = [threading.Thread(target=traffic, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        in_child(lambda: deepnvme.read(bytearray(1 << 20), "file"))
    stop = True
    for thread in threads:
        thread.join()
    """)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(tmp_path: Path, python: Run, method: str) -> None:
    (tmp_path / "work.py").write_text("import deepnvme\ndef work(i):\n    return deepnvme.write(bytes(i), f'f{i}')\n")
    python(f"""
        import multiprocessing, sys
        import deepnvme
        sys.path.insert(0, ".")
        import work
        if __name__ == "__main__":
            deepnvme.write(b"x", "parent")
            with multiprocessing.get_context({method!r}).Pool(2) as pool:
                assert pool.map(work.work, range(20)) == list(range(20))
            assert deepnvme.write(b"x", "parent") == 1
    """)


def test_exit_finishes_what_is_in_flight(python: Run, tmp_path: Path) -> None:
    python("""
        import deepnvme
        engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
        kept = engine.start_write(b"k" * (16 << 20), "kept")
        engine.start_write(b"d" * (8 << 20), "dropped")
        del engine
        deepnvme.start_write(b"e" * (8 << 20), "default")
    """)
    sizes = {name: (tmp_path / name).read_bytes() for name in ("kept", "dropped", "default")}
    assert sizes == {"kept": b"k" * (16 << 20), "dropped": b"d" * (8 << 20), "default": b"e" * (8 << 20)}


def test_exit_warns_of_failures_that_nobody_saw(python: Run) -> None:
    ended = python(
        """
        import deepnvme
        deepnvme.write(b"12345", "file")
        deepnvme.start_read(bytearray(10), "file")
        kept = deepnvme.start_read(bytearray(11), "file")
        """,
        options=("-W", "always"),
    )
    assert ended.stderr.count("nobody looked at the failure") == 2, ended.stderr


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


def test_exit_with_daemon_threads_at_work(python: Run) -> None:
    for _ in range(5):
        python("""
            import threading
            import deepnvme
            deepnvme.write(bytes(1 << 20), "file")
            working = threading.Semaphore(0)

            def work(start):
                target = bytearray(1 << 20)
                while True:
                    start(target, "file")
                    working.release()

            for start in (deepnvme.read, lambda *arguments: deepnvme.start_read(*arguments).wait()) * 2:
                threading.Thread(target=work, args=(start,), daemon=True).start()
            for _ in range(20):
                working.acquire()
        """)


def test_exit_throws_unfinished_files_away(python: Run, tmp_path: Path) -> None:
    ended = python(
        """
        import deepnvme
        file = deepnvme.open("file", "wb")
        file.write(bytes(20_000_000))
        cycle = [deepnvme.open("other", "wb")]
        cycle.append(cycle)
        cycle[0].write(b"x")
        del cycle
        """,
        options=("-W", "always"),
    )
    assert list(tmp_path.iterdir()) == []
    assert ended.stderr.count("thrown away") == 2, ended.stderr


def test_exit_after_sys_exit_and_exceptions(python: Run) -> None:
    python("import deepnvme\ndeepnvme.start_write(bytes(1 << 20), 'file')\nraise SystemExit(3)", status=3)
    python("import deepnvme\ndeepnvme.start_write(bytes(1 << 20), 'file')\nraise KeyError", status=1)


def test_calls_in_other_exit_functions(python: Run) -> None:
    python("""
        import atexit
        def late():
            assert deepnvme.write(b"12345", "late") == 5
            with deepnvme.open("later", "wb") as file:
                file.write(b"12345")
        atexit.register(late)
        import deepnvme
        deepnvme.write(b"x", "file")
    """)


def test_a_module_level_import_is_cheap(python: Run) -> None:
    ended = python("import deepnvme, sys; print(*sys.modules)")
    loaded = set(ended.stdout.split())
    assert not loaded & {"torch", "numpy", "asyncio", "deepspeed", "ctypes", "inspect"}
    assert "deepnvme.deepspeed" not in loaded
