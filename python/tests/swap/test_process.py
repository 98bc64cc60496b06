"""Processes that fork, crash and are killed; memory that stays within its limit."""

from __future__ import annotations

import fcntl
import signal
import textwrap
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import deepnvme
from process_memory import PROCESS_MEMORY
from programs import Program, program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PREFIX = ".deepnvme-swap-"

HOLD = """
import sys, time, torch, deepnvme
swapper = deepnvme.Swapper(sys.argv[1], memory="1MB", named=sys.argv[2] == "named")
swapper.put("a", torch.ones(1000))
swapper.flush()
print("ready", flush=True)
time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(PREFIX))


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def start(kind: str) -> Program:
            holder = stack.enter_context(program(HOLD, tmp_path, kind))
            assert holder.stdout.readline() == "ready\n"
            return holder

        def kill(holder: Program) -> int:
            holder.kill()
            return holder.wait()

        unnamed, named, alive = start("unnamed"), start("named"), start("named")
        assert len(names(tmp_path)) == 2
        for holder in (unnamed, named):
            assert kill(holder) == -signal.SIGKILL
        assert len(names(tmp_path)) == 2, "the named one is there still"
        with deepnvme.Swapper(tmp_path, memory="1MB"):
            (left,) = names(tmp_path)
            with (tmp_path / left).open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert kill(alive) == -signal.SIGKILL, "that of the living process is left alone"


def test_a_named_file_is_private_and_goes_at_the_end(tmp_path: Path, python: Callable[..., Any]) -> None:
    python("""
        import os, stat, torch, deepnvme
        swapper = deepnvme.Swapper(".", memory="1MB", named=True)
        swapper.put("a", torch.ones(10))
        (name,) = [name for name in os.listdir() if name.startswith(".deepnvme-swap-")]
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
        with deepnvme.Swapper(".", memory="1MB", named=True) as other:
            assert os.path.exists(name), "another one leaves it alone"
    """)
    assert names(tmp_path) == []


def test_a_forked_child_is_told_and_the_parent_goes_on(python_fork: Callable[..., Any]) -> None:
    python_fork("""
        import gc, os, signal, torch, deepnvme
        swapper = deepnvme.Swapper(".", memory=8 * 4096, named=True)
        for index in range(12):
            swapper.put(str(index), torch.full((1024,), float(index)))
        borrow = swapper.borrow("0")
        borrowed = borrow.__enter__()
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            calls = [
                lambda: swapper.put("x", torch.ones(1)), lambda: swapper.borrow("1").__enter__(),
                lambda: swapper.flush(), lambda: swapper.delete("1"), lambda: swapper.prefetch(["1"]),
                lambda: swapper.schedule(["1"]), lambda: swapper.extents("1"),
                lambda: swapper.read("1", 0, torch.empty(1)), lambda: swapper.keys(), lambda: swapper.stats(),
                lambda: len(swapper), lambda: "1" in swapper,
            ]
            status = 0
            for index, call in enumerate(calls):
                try:
                    call()
                except deepnvme.errors.ClosedError as error:
                    assert "fork" in str(error)
                else:
                    print("call", index, "did not raise", flush=True)
                    status = 1
            borrow.__exit__(None, None, None)
            swapper.close()
            del swapper, borrow, borrowed
            gc.collect()
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert len([name for name in os.listdir() if name.startswith(".deepnvme-swap-")]) == 1
        borrowed.add_(100)
        borrow.__exit__(None, None, None)
        for index in range(12):
            with swapper.borrow(str(index)) as borrowed:
                assert borrowed.eq(index + (100 if index == 0 else 0)).all()
    """)


def test_memory_stays_within_its_bound(python_fork: Callable[..., Any]) -> None:
    """A child with limited memory swaps ten times as much."""
    python_fork(
        PROCESS_MEMORY
        + textwrap.dedent("""
        import resource, torch, deepnvme
        torch.set_num_threads(1)
        MEMORY, ITEM = 24 << 20, 2 << 20
        deepnvme.default_engine()
        scratch = torch.zeros(ITEM // 4)
        with deepnvme.Swapper(".", memory="1MB") as warm:
            warm.put("a", torch.ones(1000))
        before = restart_peak()
        limit = memory_bytes("VmData") + MEMORY + (64 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        swapper = deepnvme.Swapper(".", memory=MEMORY)
        keys = [str(index) for index in range(120)]
        for key in keys:
            swapper.put(key, scratch)
        swapper.schedule(keys)
        for step in range(2):
            for key in keys:
                with swapper.borrow(key) as borrowed:
                    borrowed += 1
        stats = swapper.stats()
        assert stats.resident_bytes_peak <= MEMORY == stats.memory_bytes
        assert stats.stored_bytes == 120 * ITEM
        peak = memory_bytes("VmHWM") - before
        assert peak < MEMORY + (48 << 20), peak
        with swapper.borrow("77", shared=True) as borrowed:
            assert borrowed.eq(2).all()
        """)
    )


def test_ctrl_c_ends_a_wait(python_fork: Callable[..., Any]) -> None:
    python_fork("""
        import os, signal, threading, torch, deepnvme
        swapper = deepnvme.Swapper(".", memory=4096)
        for key in "ab":
            swapper.put(key, torch.zeros(1024))
        held, done = threading.Event(), threading.Event()
        def hold():
            with swapper.borrow("a") as borrowed:
                held.set()
                done.wait()
                borrowed += 1
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            with swapper.borrow("b"):
                raise AssertionError("it is not to be had")
        except KeyboardInterrupt:
            pass
        done.set()
        thread.join()
        with swapper.borrow("b"):
            pass
        with swapper.borrow("a") as borrowed:
            assert borrowed.eq(1).all()
    """)


def test_the_interpreter_ends_with_a_swapper_at_work(tmp_path: Path, python: Callable[..., Any]) -> None:
    python("""
        import torch, deepnvme
        swapper = deepnvme.Swapper(".", memory="8MB", named=True)
        for index in range(20):
            swapper.put(str(index), torch.zeros(1 << 18))
        borrowed = swapper.borrow("3").__enter__()
    """)
    assert names(tmp_path) == []
    assert not any(tmp_path.iterdir())
