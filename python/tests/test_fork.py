"""Forks: a child has a fresh engine, or a clear error."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

FORK = """
    import os, signal, sys, threading
    import deepnvme

    def in_child(work):
        pid = os.fork()
        if pid == 0:
            # A child that hangs is an error of its parent's.
            signal.alarm(60)
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
        deepnvme.start_write(b"child!", "other").result()
        with deepnvme.open("third", "wb") as file:
            file.write(b"x" * 10_000_000)
        in_child(lambda: deepnvme.write(b"grand", "grandchild"))

    in_child(work)
    target = bytearray(6)
    deepnvme.read(target, "other")
    assert target == b"child!"
    assert deepnvme.default_engine() is before
    """)


def test_objects_from_before_the_fork_raise_in_the_child(python: Run) -> None:
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
            lambda: pending.result(),
            lambda: pending.result(5),
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
    assert pending.result() == 64 << 20
    assert reader.read() == b"12345"
    """)


def test_the_child_exits_in_the_ordinary_way(python: Run) -> None:
    ended = python("""
        import os, signal, sys
        import deepnvme
        engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
        pending = engine.start_write(bytes(32 << 20), "file")
        forgotten = engine.start_write(bytes(4 << 20), "forgotten")
        del forgotten
        deepnvme.start_write(b"x", "default")
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            print("child", flush=True)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert pending.result() == 32 << 20
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
            deepnvme.start_read(target, "file").result()
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


def test_a_fork_while_a_thread_releases_tensors(python: Run) -> None:
    """What a thread without the GIL lets go of goes through a lock of PyO3's, which a child must not inherit locked."""
    pytest.importorskip("torch")
    python("""
    import os, time, torch
    from deepnvme import _deepnvme
    storages = [torch.full((3,), float(index)).untyped_storage() for index in range(20_000)]
    options = {"engine": None, "durability": "none", "checksums": False, "staging": None}
    for _ in range(2):
        # Each thread that saves lets go of thousands of storages at its end.
        plans = [_deepnvme._plan_archive(f"{number}.pt", [], storages, [], options) for number in range(3)]
        savings = [plan.start() for plan in plans]
        while not all(saving.done for saving in savings):
            child = os.fork()
            if child == 0:
                _deepnvme._list_state(b"{}")
                os._exit(0)
            deadline = time.monotonic() + 20
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > deadline:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    os._exit(9)
                time.sleep(0.001)
            assert ended[1] == 0
    os._exit(0)
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


def test_a_fork_while_other_threads_make_their_first_transfers(python: Run) -> None:
    """Neither the engine, nor the CUDA driver, nor a module is made under a lock that the child would wait for."""
    pytest.importorskip("torch")
    python(f"""{FORK}
    import time, torch
    torch.set_num_threads(1)
    tensor, small = torch.ones(4_000_000), torch.ones(100_000)

    def work():
        for _ in range(20):
            deepnvme.write(tensor, "file")

    def child():
        deepnvme.save({{"a": small}}, "saved.pt")
        assert deepnvme.load("saved.pt")["a"].equal(small)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        in_child(child)
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    """)


def test_a_fork_while_other_threads_make_their_first_saves(python: Run) -> None:
    """No value that is made once is made under a lock that the child would wait for."""
    pytest.importorskip("torch")
    python(f"""{FORK}
    import importlib, json, torch
    torch.set_num_threads(1)
    tensor = torch.ones(3)

    def save():
        deepnvme.save({{"a": tensor}}, f"{{os.getpid()}}-{{threading.get_ident()}}.pt", durability="none")

    # Modules that are imported for the first time have locks of Python's own.
    def tell_modules():
        save()
        with open("modules", "w") as file:
            json.dump([name for name in sys.modules if name.startswith("deepnvme.")], file)

    def forks_while_threads_save():
        # Threads take turns as often as they can.
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=save) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            in_child(save)
        for thread in threads:
            thread.join()

    in_child(tell_modules)
    for name in json.load(open("modules")):
        importlib.import_module(name)
    for _ in range(12):
        in_child(forks_while_threads_save)
    """)


@pytest.mark.parametrize("leave", ["engine.close()", "del engine", "sys.exit(0)", "with engine: pass"])
@pytest.mark.parametrize("backend", ["io_uring", "aio", "threads"])
def test_a_child_lets_go_of_threads_that_it_does_not_have(tmp_path: Path, backend: str, leave: str) -> None:
    # With many threads in the parent, the C library gives the stacks of some back in the child as soon as it starts
    # threads of its own. To detach one of those would end the child.
    program = f"""
import os, sys, threading, deepnvme
try:
    engine = deepnvme.Engine(backend={backend!r}, workers=2)
except deepnvme.Error:
    sys.exit(0)  # this machine lacks the backend
engine.write(bytes(100_000), "file")
stop = threading.Event()
for _ in range(12):
    threading.Thread(target=stop.wait, daemon=True).start()
child = os.fork()
if child == 0:
    own = threading.Thread(target=int)
    own.start()
    own.join()
    {leave}
    os._exit(0)
status = os.waitpid(child, 0)[1]
engine.close()
os._exit(status != 0)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)


FORKED_IN_A_CALLBACK = {
    "save": 'deepnvme.save(state, "x.pt", progress=fork)',
    "save of shards": 'deepnvme.save(state, "x.safetensors", max_shard_bytes="20MB", progress=fork)',
    "Checkpointer": 'deepnvme.Checkpointer("c", progress=fork).save(1, state)',
    "load": 'deepnvme.load("whole.pt", progress=fork)',
}


@pytest.mark.parametrize("call", FORKED_IN_A_CALLBACK)
def test_an_exception_leaves_a_child_that_was_forked_during_a_call(python: Run, call: str) -> None:
    python(f"""
    import os, signal, time
    import torch, deepnvme

    class Left(BaseException):
        pass

    child = None

    def fork(done, total):
        global child
        if child is None:
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                raise Left

    state = {{"a": torch.randn(20_000_000)}}
    deepnvme.save(state, "whole.pt")
    try:
        {FORKED_IN_A_CALLBACK[call]}
    except Left:
        os._exit(7)
    assert child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """)


@pytest.mark.parametrize("ends", ["raises", "returns"])
def test_a_child_that_a_signal_handler_forks_in_a_background_save(python: Run, ends: str) -> None:
    python(f"""
    import os, signal, time
    import torch, deepnvme

    class Left(BaseException):
        pass

    children = []

    def fork(*_):
        child = os.fork()
        if child:
            children.append(child)
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        if "{ends}" == "raises":
            raise Left

    signal.signal(signal.SIGALRM, fork)
    state = {{"a": torch.randn(10_000_000)}}
    checkpointer = deepnvme.Checkpointer("c", async_=True, memory="10MB")
    parent = os.getpid()
    try:
        for step in range(4):
            signal.setitimer(signal.ITIMER_REAL, 0.003 * (step + 1))
            checkpointer.save(step, state)
            checkpointer.wait()
    except (Left, deepnvme.errors.ClosedError):
        assert os.getpid() != parent
    if os.getpid() != parent:
        os._exit(7)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert children
    assert checkpointer.latest().step == 3
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """)
