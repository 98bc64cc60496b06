"""Run the test suites, some at a time, show their output, and count the tests. Standard library only.

    python scripts/run_tests.py [SUITE ...]

Three suites run at a time. The Python tests wait for the disk and for deadlines more than they compute, so both halves
of them run together with the Rust tests, which keep all CPUs busy while they are compiled. The Rust suites have a lower
priority, so that deadlines hold. The output is shown suite by suite, to avoid mixing, each line as soon as its suite is
due. The name `python` selects all suites whose names begin with it.

A suite without output for SILENCE_S is considered hanging and is killed. Failures are listed again at the end, with the
last lines of suites that crashed, were killed or name no failure, so that the end of the log suffices.

The last line is the total, `N passed, M failed, K skipped`. It is also written to target/test-total.txt. A suite counts
as at least one failed test if its command fails or if it ran no test, so that a broken run cannot look like a good one.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from suite_counts import Count, count_cargo, count_pytest

ROOT = Path(__file__).resolve().parent.parent
TOTAL = ROOT / "target" / "test-total.txt"
WORKERS = 3
SILENCE_S = 1200  # a single test takes less by far, and so does a build of all crates on a busy machine
LAST_LINES = 60  # of a suite that was killed: the stacks of its threads
CRASH = re.compile(
    r"^Fatal Python error|^Timeout \(|^hang_watch: |^\s*(?:SIGSEGV|SIGABRT|SIGBUS)|^thread '.*' .*panicked at"
)

CARGO_FAILED = re.compile(r"^(?:test (\S+) \.\.\. FAILED|thread '.*' (?:\(\d+\) )?panicked at .*)$")
PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) \S+")


@dataclass(frozen=True)
class Suite:
    """A command, its extra environment, its parser of counts, and the suite whose end it waits for."""

    name: str
    command: list[str]
    count: Callable[[list[str]], Count] | None  # None: runs again what another suite counted
    environment: dict[str, str] = field(default_factory=dict)
    after: str = ""

    @property
    def niceness(self) -> int:
        """The priority: compilers give way to tests that have deadlines."""
        return 0 if self.name.startswith("python") else 5


PYTEST = [sys.executable, "-m", "pytest", "-v"]
# The tests of state take about half of the time of all Python tests.
STATE = [f"python/tests/{name}" for name in ("checkpoint", "offload", "optim", "stream", "swap", "training")]
SIMULATED = {"RUSTFLAGS": "--cfg simulated", "CARGO_TARGET_DIR": "target/simulated"}
LOOM_PACKAGES = [f"--package=deepnvme-{name}" for name in ("mem", "io", "swap")]
# All executions of two models take minutes. Those with at most five preemptions take seconds.
LOOM = {"RUSTFLAGS": "--cfg loom", "CARGO_TARGET_DIR": "target/loom", "LOOM_MAX_PREEMPTIONS": "5"}
# In the order of their beginning: the longest first.
SUITES = [
    Suite("rust", ["cargo", "test", "--workspace", "--no-fail-fast"], count_cargo),
    Suite("python", [*PYTEST, *(f"--ignore={folder}" for folder in STATE)], count_pytest),
    Suite("python-state", [*PYTEST, *STATE], count_pytest),
    Suite("simulated", ["cargo", "test", "--package", "deepnvme-simulation"], count_cargo, SIMULATED),
    Suite("loom", ["cargo", "test", *LOOM_PACKAGES, "--lib", "--test", "loom", "loom_"], count_cargo, LOOM),
    # It runs binaries that the Rust tests have compiled.
    Suite("valgrind", [sys.executable, "scripts/valgrind.py"], None, after="rust"),
]
_running: set[int] = set()  # processes, each the first of its group


@dataclass(frozen=True)
class Ended:
    """The result of a suite's command."""

    suite: Suite
    status: int
    lines: list[str]
    took_s: float
    cpu_s: float

    def failures(self) -> list[str]:
        """Return the lines that name failures.

        The last lines are added if a signal ended the suite, or if no line names a failure.
        """
        named = [line for line in self.lines if CARGO_FAILED.match(line) or PYTEST_FAILED.match(line)]
        if self.status == 0:
            return []
        if named and self.status > 0:
            return named
        return named + self.lines[self.first_of_last() :][:LAST_LINES]

    def first_of_last(self) -> int:
        """Return the index of the first line to show: three before the first crash, or that of the last LAST_LINES."""
        last = max(len(self.lines) - LAST_LINES, 0)
        crashes = (index for index, line in enumerate(self.lines) if CRASH.match(line))
        return max(min(next(crashes, last + 3) - 3, last), 0)


def run(suite: Suite, show: Callable[[str], None]) -> Ended:
    """Run the command, and show each line of its output."""
    begin = time.monotonic()
    priority = ["nice", "-n", str(suite.niceness)] if suite.niceness else []
    process = subprocess.Popen(
        [*priority, *suite.command],
        cwd=ROOT,
        env={**os.environ, **suite.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process.pid)
    lines: list[str] = []
    heard_s = begin

    def watch() -> None:
        while not ended.wait(1):
            if time.monotonic() - heard_s > SILENCE_S:
                os.killpg(process.pid, signal.SIGKILL)
                return

    ended = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            heard_s = time.monotonic()
            lines.append(line.rstrip("\n"))
            show(lines[-1])
        _, waited, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(waited)
        return Ended(suite, process.returncode, lines, time.monotonic() - begin, usage.ru_utime + usage.ru_stime)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        ended.set()
        watcher.join()
        _running.discard(process.pid)


def title(suite: Suite) -> None:
    """Announce a suite."""
    print(f"\n== {suite.name}: {' '.join(suite.command)}", flush=True)


class Schedule:
    """Runs suites, as many at a time as there are workers, and hands their lines on in the order of the suites."""

    def __init__(self, suites: list[Suite]) -> None:
        """Begin nothing yet."""
        self._suites = suites
        self._waiting = list(range(len(suites)))
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        # A suite's lines, then its end.
        self._output: list[queue.SimpleQueue[str | Ended | BaseException]] = [queue.SimpleQueue() for _ in suites]

    def results(self) -> Iterable[Ended]:
        """Run all, print each line once its suite is due, and yield the suites in their order."""
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(min(WORKERS, len(self._suites)))]
        for worker in workers:
            worker.start()
        try:
            for index, suite in enumerate(self._suites):
                title(suite)
                yield self._shown(index)
        except BaseException:
            for group in [*_running]:
                os.killpg(group, signal.SIGTERM)
            raise

    def _shown(self, index: int) -> Ended:
        while isinstance(said := self._output[index].get(), str):
            print(said, flush=True)
        if isinstance(said, BaseException):
            raise said
        return said

    def _work(self) -> None:
        while (index := self._next()) is not None:
            output = self._output[index]
            try:
                output.put(run(self._suites[index], output.put))
            except BaseException as error:  # noqa: BLE001 (the main thread raises it)
                output.put(error)
            with self._changed:
                self._ended.add(index)
                self._changed.notify_all()

    def _next(self) -> int | None:
        """Take the first suite that waits for no other; wait if all do."""
        with self._changed:
            while self._waiting:
                ready = [index for index in self._waiting if self._is_ready(self._suites[index])]
                if ready:
                    self._waiting.remove(ready[0])
                    return ready[0]
                self._changed.wait()
            return None

    def _is_ready(self, suite: Suite) -> bool:
        awaited = (index for index, other in enumerate(self._suites) if other.name == suite.after)
        return all(index in self._ended for index in awaited)


def checked_count(ended: Ended) -> Count:
    """Count a suite, corrected if its command failed or nothing ran."""
    suite, status, lines = ended.suite, ended.status, ended.lines
    count = suite.count(lines) if suite.count else Count()
    if status != 0 and count.failed == 0:
        print(f"{suite.name}: the command ended with status {status}: counted as one failed test")
        return count + Count(failed=1)
    if status == 0 and count.failed != 0:
        raise AssertionError(f"{suite.name}: the command succeeded though {count.failed} tests failed")
    if suite.count and count == Count():
        print(f"{suite.name}: no test ran: counted as one failed test")
        return Count(failed=1)
    return count


def is_named(suite: Suite, names: list[str]) -> bool:
    """Whether a name selects the suite: its own, or the part before the hyphen."""
    return suite.name in names or suite.name.partition("-")[0] in names


def main(names: list[str]) -> int:
    """Run the named suites, or all. Exit status 1 if anything failed."""
    if unknown := {name for name in names if not any(is_named(suite, [name]) for suite in SUITES)}:
        print(f"no such suite: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    TOTAL.unlink(missing_ok=True)
    table, failures, total = [], [], Count()
    for ended in Schedule([suite for suite in SUITES if not names or is_named(suite, names)]).results():
        count = checked_count(ended)
        what = str(count) if ended.suite.count or count.failed else "clean (tests counted above)"
        table.append(f"{ended.suite.name:<17} {what}  [{ended.took_s:.0f} s, {ended.cpu_s:.0f} s of CPU]")
        failures += [f"{ended.suite.name}: {line}" for line in ended.failures()]
        total += count
    if failures:
        print("\n== failures\n" + "\n".join(failures))
    print("\n" + "\n".join(table))
    TOTAL.parent.mkdir(exist_ok=True)
    TOTAL.write_text(f"{total}\n")
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
