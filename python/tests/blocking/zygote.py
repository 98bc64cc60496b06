"""A process that has imported all that cells need, and forks a child for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# The time limit of a cell, counted from its event, and the attempts that a busy machine gets.
LIMIT_S = 1.0
ATTEMPTS = 8
TOO_SLOW = 75

# The default engine makes a system call for every 4 KiB, one after the other: some MiB are seconds of work.
SLOW = '[engine]\nbackend = "threads"\nworkers = 1\nqueue_depth = 1\nblock_bytes = 4096\n'

TORCH = "import torch, torch._dynamo"
TENSORS = """
import deepnvme._checkpoint.checkpointer, deepnvme._offload, deepnvme._stream, deepnvme.optim
from deepnvme import optim
from torch import nn
torch.set_num_threads(1)
"""

ZYGOTE = """
import atexit, asyncio, gc, json, mmap, os, signal, sys, threading, time, warnings
# Called after what the package does at exit, which registers itself later.
atexit.register(lambda: print(time.time(), flush=True))
exec(sys.argv[1])
gc.collect()
# Without this, the collections at the exit of a child visit all objects of torch, which takes a second.
gc.freeze()
import deepnvme
from deepnvme import errors
exec(sys.argv[2])
warnings.simplefilter("ignore")
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    folder, program = json.loads(line)
    child = os.fork()
    if child == 0:
        # One that hangs, in whatever, ends.
        signal.alarm(60)
        os.chdir(folder)
        for number in (1, 2):
            os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, time.time()]), file=answers, flush=True)
else:
    os._exit(0)
exec(program)
"""

SETUP = f"""
came = []

def moved():
    stats = deepnvme.stats()
    return stats.bytes_written + stats.bytes_read

def busy(nbytes=1 << 16):
    "Whether the disk has been at work since."
    before = moved()
    return lambda: moved() > before + nbytes

def soon(act, is_time):
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
    return thread

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
        raise SystemExit(f"{{error}} was not raised")

def returns(call):
    answer = call()
    while not came:
        time.sleep(0.001)
    in_time()
    return answer

def unless_closed(call):
    "The call, without its ClosedError."
    def run():
        try:
            call()
        except errors.ClosedError:
            pass
    return run

def both_close(close, is_time):
    "Another thread closes, and then this one."
    soon(close, is_time)
    while not came:
        time.sleep(0.001)
    returns(close)

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

def leave(call, is_time):
    "Ends the interpreter while a thread is in the call."
    threading.Thread(target=call, daemon=True).start()
    while not is_time():
        time.sleep(0.001)
    print(time.time(), flush=True)

def at(seconds):
    began = time.monotonic()
    return lambda: time.monotonic() - began > seconds
"""


class Zygote:
    """Runs programs in forks of a process that has imported all that they need.

    Args:
        folder: for its settings.
        foreign: a program that imports packages of others. Collections at exit leave their objects alone.
        imports: a program that each of them begins with.
    """

    def __init__(self, folder: Path, foreign: str, imports: str) -> None:
        settings = folder / "slow.toml"
        settings.write_text(SLOW)
        self._process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE, foreign, imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"DEEPNVME_CONFIG": str(settings)},
        )

    def run(self, folder: Path, program: str) -> tuple[int, float]:
        """Give the status of a program, and when it had ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), program]), file=self._process.stdin, flush=True)
        # Each child has an alarm.
        status, ended = json.loads(self._process.stdout.readline())
        return status, ended

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
