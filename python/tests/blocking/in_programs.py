"""Functions of programs: cause an event while a call waits, and check that the call ends in time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import deepnvme
from deepnvme import errors

from .exit_times import Delays, exit_began, exit_checks
from .limits import LIMIT_S, TIMED_OUT_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable


class Events(list[float]):
    """When events came, in seconds of the monotonic clock."""

    delays: Delays

    def append(self, when: float) -> None:
        """Record an event."""
        self.delays = Delays()
        super().append(when)


event_times = Events()


def bytes_moved() -> int:
    """Return the bytes read and written so far."""
    stats = deepnvme.stats()
    return stats.bytes_written + stats.bytes_read


def busy(nbytes: int = 1 << 16) -> Callable[[], bool]:
    """Return a condition: more bytes than these have been read or written since."""
    before = bytes_moved()
    return lambda: bytes_moved() > before + nbytes


def at(seconds: float) -> Callable[[], bool]:
    """Return a condition that holds after this many seconds."""
    began = time.monotonic()
    return lambda: time.monotonic() - began > seconds


def soon(act: Callable[[], object], is_time: Callable[[], object]) -> threading.Thread:
    """Cause an event in another thread once a condition holds."""
    is_started = threading.Event()

    def wait() -> None:
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


def check_time() -> None:
    """End the program if the event was too long ago."""
    took = time.monotonic() - event_times[0]
    if took - event_times.delays.seconds() > LIMIT_S:
        print(f"{took} s, of which {event_times.delays.seconds()} without a CPU", flush=True)  # noqa: T201
        os._exit(TIMED_OUT_STATUS)


def raises(error: Any, call: Callable[[], object]) -> None:
    """Check that a call raises this error, in time."""
    try:
        call()
    except error:
        if event_times:
            check_time()
    else:
        raise SystemExit(f"{error} was not raised")


def ends_at_close(
    call: Callable[[], object], close: Callable[[], object], is_time: Callable[[], object] | None = None
) -> None:
    """Close in another thread during a call, and check that the call raises ClosedError in time."""
    soon(close, is_time or busy())
    raises(errors.ClosedError, call)


def ends_at_interrupt(call: Callable[[], object], is_time: Callable[[], object] | None = None) -> None:
    """Press Ctrl-C during a call, and check that the call raises KeyboardInterrupt in time."""
    soon(interrupt, is_time or busy())
    raises(KeyboardInterrupt, call)


def returns(call: Callable[[], Any]) -> Any:
    """Check that a call returns in time."""
    result = call()
    while not event_times:
        time.sleep(0.001)
    check_time()
    return result


def unless_closed(call: Callable[[], object]) -> Callable[[], None]:
    """Return the call without its ClosedError."""

    def run() -> None:
        with contextlib.suppress(errors.ClosedError):
            call()

    return run


def run_until_moving(call: Callable[[], object]) -> None:
    """Make a call in another thread, and wait until it moves bytes. It may end with ClosedError."""
    moves = busy()
    threading.Thread(target=unless_closed(call), daemon=True).start()
    while not moves():
        time.sleep(0.001)


def interrupted_close(close: Callable[[], object]) -> None:
    """Close in this thread, and check that Ctrl-C ends that."""

    def call() -> None:
        event_times.append(time.monotonic())
        interrupt()
        close()
        time.sleep(0.2)

    raises(KeyboardInterrupt, call)


def both_close(close: Callable[[], object], is_time: Callable[[], object]) -> None:
    """Close in another thread, and then in this one."""
    soon(close, is_time)
    while not event_times:
        time.sleep(0.001)
    returns(close)


def interrupt() -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def in_child(work: Callable[[], object]) -> None:
    """Run work in a forked child, which has to succeed."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        event_times.append(time.monotonic())
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def leave(call: Callable[[], object], is_time: Callable[[], object]) -> None:
    """End the interpreter while a thread is in the call."""
    threading.Thread(target=call, daemon=True).start()
    while not is_time():
        time.sleep(0.001)
    exit_began.append((time.time(), Delays()))


def leave_closed(call: Callable[[], object], is_time: Callable[[], object]) -> None:
    """End the interpreter while a thread is in the call, which has to raise ClosedError there."""
    results: list[str | None] = []

    def run() -> None:
        try:
            results.append(f"it returned {call()!r}")
        except errors.ClosedError:
            results.append(None)
        except BaseException as error:
            results.append(repr(error))

    def check() -> None:
        # Otherwise Python may end the thread before it can raise.
        thread.join(10)
        if results != [None]:
            print(f"ClosedError was not raised in the thread: {results}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)

    thread = threading.Thread(target=run, daemon=True)
    exit_checks.append(check)
    thread.start()
    while not is_time():
        time.sleep(0.001)
    exit_began.append((time.time(), Delays()))
