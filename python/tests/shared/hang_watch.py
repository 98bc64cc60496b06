"""Stop hanging tests and show where they hang. Pytest hooks that python/tests/conftest.py imports.

After CHILDREN_S, all processes that tests of this run started are killed: first by SIGABRT, upon which Python processes
dump the stacks of their threads, then by SIGKILL. A test that waits for a process or its output then fails, and the
next one begins.

After SELF_S, pytest itself is aborted and dumps its stacks. Standard library and pytest only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

CHILDREN_S = 240.0
SELF_S = 420.0
MARK = "DEEPNVME_TEST_RUN"


class Watch:
    """A thread that watches how long the current test has taken."""

    def __init__(self, stderr: int, children_s: float = CHILDREN_S, self_s: float = SELF_S) -> None:
        self._stderr = stderr
        self._children_s, self._self_s = children_s, self_s
        self._run = f"{MARK}={uuid.uuid4()}"
        self._test: tuple[str, float] | None = None
        self._ended = threading.Event()
        name, _, value = self._run.partition("=")
        os.environ[name] = value  # inherited by whatever tests start
        os.environ.setdefault("PYTHONFAULTHANDLER", "1")
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def begin(self, test: str) -> None:
        """Record the start of a test."""
        self._test = (test, time.monotonic())

    def end(self) -> None:
        """Record the end of a test."""
        self._test = None

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        noted = ""
        while not self._ended.wait(min(1.0, self._children_s / 4)):
            if (now := self._test) is None:
                continue
            test, began_s = now
            took_s = time.monotonic() - began_s
            if took_s > self._self_s:
                self._say(f"{test} has taken {took_s:.0f} s: aborting pytest")
                os.kill(os.getpid(), signal.SIGABRT)
            elif took_s > self._children_s and noted != test:
                noted = test
                self._say(f"{test} has taken {took_s:.0f} s: killing its processes")
                self._kill()

    def _kill(self) -> None:
        for number in (signal.SIGABRT, signal.SIGKILL):
            for pid in self.started():
                self._say(f"{number.name} to {describe(pid)}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(2)

    def started(self) -> list[int]:
        """Return the live processes that this run's tests have started, the highest pid first."""
        found = descendants(os.getpid())
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    variables = (folder / "environ").read_bytes()
                except OSError:
                    continue
                if self._run.encode() in variables.split(b"\0"):
                    found.add(int(folder.name))
        return sorted(found, reverse=True)

    def _say(self, text: str) -> None:
        os.write(self._stderr, f"\nhang_watch: {text}\n".encode())


def descendants(parent: int) -> set[int]:
    """Return the descendants of a process, as far as their parents live."""
    found: set[int] = set()
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            direct = {int(pid) for pid in task.read_text().split()}
        except OSError:
            continue
        found |= direct
        for pid in direct:
            found |= descendants(pid)
    return found


def describe(pid: int) -> str:
    """Describe a process: its command, and the kernel functions in which its threads wait."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
        waits = [wait.read_text() or "running" for wait in Path(f"/proc/{pid}/task").glob("*/wchan")]
    except OSError as error:
        return f"{pid} ({error})"
    return f"{pid}, in {', '.join(waits)}: {command!r}"


def pytest_configure(config: pytest.Config) -> None:
    """Start watching."""
    config.stash[KEY] = Watch(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop watching."""
    if (watch := config.stash.get(KEY, None)) is not None:
        watch.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limit one test, including its fixtures."""
    watch = item.config.stash[KEY]
    watch.begin(item.nodeid)
    try:
        return (yield)
    finally:
        watch.end()


KEY = pytest.StashKey[Watch]()
