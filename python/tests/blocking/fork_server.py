"""Run each program in a fork of a process that has already imported the packages it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# The most seconds between an event and the end of the call, without those in which a thread waited for a CPU.
LIMIT_S = 1.0
# A busy disk may exceed the limit now and then. A call that is late has to be in time more often than not.
LATE_MAX = 2
# The exit status of a program whose call exceeded the limit.
TIMED_OUT_STATUS = 75

# The default engine makes one system call at a time, for 4 KiB each, so that some MiB take seconds.
SLOW_SETTINGS = '[engine]\nbackend = "threads"\nworkers = 1\nqueue_depth = 1\nblock_bytes = 4096\n'

TORCH = "import torch, torch._dynamo"
TENSORS = """
import deepnvme._checkpoint.checkpointer, deepnvme._offload, deepnvme._stream, deepnvme.optim
from deepnvme import optim
from torch import nn
torch.set_num_threads(1)
"""

SERVER_PROGRAM = """
import atexit, asyncio, gc, json, mmap, os, signal, sys, threading, time, warnings
exit_checks = []

class Delays:
    "How long the threads of this process have been ready to run, but had no CPU."

    def __init__(self):
        self._before = self._now()

    def _now(self):
        found = {}
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/schedstat") as file:
                    found[thread] = int(file.read().split()[1]) / 1e9
            except (OSError, IndexError):
                # The thread has ended, or the kernel does not count.
                pass
        return found

    def seconds(self):
        "That of the thread that waited longest since."
        return max((now - self._before.get(thread, 0) for thread, now in self._now().items()), default=0)

exit_began = []
# Runs after the package's own exit handlers, which are registered later.
@atexit.register
def end():
    for check in exit_checks:
        check()
    # The times of the event and of the end.
    for began, delays in exit_began:
        print(f"<exit {began} {time.time()} {delays.seconds()}>", flush=True)
exec(sys.argv[1])
gc.collect()
# Without this, garbage collection at the exit of a child visits all objects of torch, which takes a second.
gc.freeze()
import deepnvme
from deepnvme import errors
exec(sys.argv[2])
warnings.simplefilter("ignore")
results = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    folder, program = json.loads(line)
    child = os.fork()
    if child == 0:
        # End a program that hangs.
        signal.alarm(60)
        os.chdir(folder)
        for number in (1, 2):
            os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, time.time()]), file=results, flush=True)
else:
    os._exit(0)
exec(program)
"""

SETUP = f"""
class Events(list):
    "When events came, in seconds of the monotonic clock."

    def append(self, when):
        self.delays = Delays()
        super().append(when)

event_times = Events()

def bytes_moved():
    stats = deepnvme.stats()
    return stats.bytes_written + stats.bytes_read

def busy(nbytes=1 << 16):
    "Return a condition: more bytes than these have been read or written since."
    before = bytes_moved()
    return lambda: bytes_moved() > before + nbytes

def soon(act, is_time):
    "Cause an event in another thread once a condition holds."
    is_started = threading.Event()
    def wait():
        # An interrupt must not come while the thread is being started.
        is_started.wait()
        while not is_time():
            time.sleep(0.001)
        event_times.append(time.monotonic())
        act()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    is_started.set()
    return thread

def check_time():
    took = time.monotonic() - event_times[0]
    if took - event_times.delays.seconds() > {LIMIT_S}:
        print(f"{{took}} s, of which {{event_times.delays.seconds()}} without a CPU", flush=True)
        os._exit({TIMED_OUT_STATUS})

def raises(error, call):
    try:
        call()
    except error:
        if event_times:
            check_time()
    else:
        raise SystemExit(f"{{error}} was not raised")

def returns(call):
    result = call()
    while not event_times:
        time.sleep(0.001)
    check_time()
    return result

def unless_closed(call):
    "Return the call without its ClosedError."
    def run():
        try:
            call()
        except errors.ClosedError:
            pass
    return run

def both_close(close, is_time):
    "Close in another thread, and then in this one."
    soon(close, is_time)
    while not event_times:
        time.sleep(0.001)
    returns(close)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def in_child(work):
    "Run work in a forked child, which has to succeed."
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        event_times.append(time.monotonic())
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def leave(call, is_time):
    "End the interpreter while a thread is in the call."
    threading.Thread(target=call, daemon=True).start()
    while not is_time():
        time.sleep(0.001)
    exit_began.append((time.time(), Delays()))

def leave_closed(call, is_time):
    "End the interpreter while a thread is in the call, which has to raise ClosedError there."
    results = []
    def run():
        try:
            results.append(f"it returned {{call()!r}}")
        except errors.ClosedError:
            results.append(None)
        except BaseException as error:
            results.append(repr(error))
    def check():
        # Otherwise Python may end the thread before it can raise.
        thread.join(10)
        if results != [None]:
            print(f"ClosedError was not raised in the thread: {{results}}", file=sys.stderr, flush=True)
            os._exit(1)
    thread = threading.Thread(target=run, daemon=True)
    exit_checks.append(check)
    thread.start()
    while not is_time():
        time.sleep(0.001)
    exit_began.append((time.time(), Delays()))

def at(seconds):
    "Return a condition that holds after this many seconds."
    began = time.monotonic()
    return lambda: time.monotonic() - began > seconds
"""


class ForkServer:
    """A process that has imported packages, and runs each program in a fork of itself.

    Args:
        folder: the folder for its settings.
        foreign_imports: code that imports packages of other projects; garbage collection skips their objects.
        own_imports: code that imports ours, and prepares what programs use.
    """

    def __init__(self, folder: Path, foreign_imports: str, own_imports: str) -> None:
        settings = folder / "slow.toml"
        settings.write_text(SLOW_SETTINGS)
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER_PROGRAM, foreign_imports, own_imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"DEEPNVME_CONFIG": str(settings)},
        )

    def run(self, folder: Path, program: str) -> tuple[int, float]:
        """Run a program. Return its exit status, and the time at which it had ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), program]), file=self._process.stdin, flush=True)
        # Each child has an alarm.
        status, ended = json.loads(self._process.stdout.readline())
        return status, ended

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
