"""Run the suites in two lanes, show what they say, and count their tests. Standard library only.

    python scripts/run_tests.py [SUITE ...]

The Python suite is one process, and keeps about one processor busy, so it runs beside all others, which come one after
another. What it says is shown when they are through: two outputs at a time are none.

A suite that says nothing for SILENCE_S is taken to hang, and is killed. What failed is named once more at the end,
with the last lines of a suite that was killed: whoever reads only the end knows where to look.

The last line is the total, `N passed, M failed, K skipped`; it is also left in target/test-total.txt. A suite whose
command fails counts as at least one failed test, and so does one that ran no test at all: a broken run can not look
like a good one. A Rust test that cannot run here writes a line `skipped: reason` to stderr past the capture of the
test harness, and is moved from passed to skipped.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOTAL = ROOT / "target" / "test-total.txt"
SILENCE_S = 1200  # a single test takes less by far, and so does a build of all crates on a busy machine
LAST_LINES = 60  # of a suite that was killed: the stacks of its threads

CARGO_RESULT = re.compile(r"test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored;")
CARGO_SKIP = re.compile(r"^(?:test .* \.\.\. )?skipped: ([\w:]+?): ")
CARGO_FAILED = re.compile(r"^(?:test (\S+) \.\.\. FAILED|thread '.*' (?:\(\d+\) )?panicked at .*)$")
PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) \S+")
PYTEST_RESULT = re.compile(r"^=*\s*(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s\b")


@dataclass(frozen=True)
class Count:
    """Tests of one suite, or of all."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def count_cargo(lines: list[str]) -> Count:
    """Sum the `test result:` lines of every test binary; tests that say they were skipped leave the passed ones."""
    total, skipped = Count(), set()
    for line in lines:
        if found := CARGO_SKIP.match(line):
            skipped.add(found[1])  # some say so several times
        elif found := CARGO_RESULT.search(line):
            passed, failed, ignored = map(int, found.groups())
            total += Count(passed - len(skipped), failed, ignored + len(skipped))
            skipped.clear()
    return total


def count_pytest(lines: list[str]) -> Count:
    """Read the last summary line; an error counts as failed, an expected failure as skipped."""
    for line in reversed(lines):
        if found := PYTEST_RESULT.match(line):
            words = {word: int(number) for number, word in (part.split() for part in found[1].split(", "))}
            failed = sum(words.get(word, 0) for word in ("failed", "error", "errors"))
            return Count(words.get("passed", 0), failed, words.get("skipped", 0) + words.get("xfailed", 0))
    return Count()


@dataclass(frozen=True)
class Suite:
    """A command, its additional environment, and how to count what it says."""

    name: str
    command: list[str]
    count: Callable[[list[str]], Count] | None  # None: runs again what another suite counted
    environment: dict[str, str] = field(default_factory=dict)


SIMULATED = {"RUSTFLAGS": "--cfg simulated", "CARGO_TARGET_DIR": "target/simulated"}
LOOM = {"RUSTFLAGS": "--cfg loom", "CARGO_TARGET_DIR": "target/loom"}
SUITES = [
    Suite("rust", ["cargo", "test", "--workspace", "--no-fail-fast"], count_cargo),
    Suite("loom", ["cargo", "test", "--package", "deepnvme-mem", "--lib", "loom_"], count_cargo, LOOM),
    Suite("loom", ["cargo", "test", "--package", "deepnvme-io", "--test", "loom"], count_cargo, LOOM),
    Suite("loom", ["cargo", "test", "--package", "deepnvme-io", "--lib", "loom_"], count_cargo, LOOM),
    Suite("loom", ["cargo", "test", "--package", "deepnvme-swap", "--lib", "loom_"], count_cargo, LOOM),
    Suite("simulated", ["cargo", "test", "--package", "deepnvme-simulation"], count_cargo, SIMULATED),
    Suite("valgrind", [sys.executable, "scripts/valgrind.py"], None),
    Suite("python", [sys.executable, "-m", "pytest", "-v"], count_pytest),
]
ASIDE = "python"
_running: set[int] = set()  # processes, each the first of its group


@dataclass(frozen=True)
class Ended:
    """What came of a suite's command."""

    suite: Suite
    status: int
    lines: list[str]
    took_s: float

    def failures(self) -> list[str]:
        """The lines that name what failed; the last lines of all where nothing is named."""
        named = [line for line in self.lines if CARGO_FAILED.match(line) or PYTEST_FAILED.match(line)]
        if self.status == 0:
            return []
        return named if named and self.status > 0 else named + self.lines[-LAST_LINES:]


def run(suite: Suite, show: Callable[[str], None]) -> Ended:
    """Run the command, and show each line that it says."""
    begin = time.monotonic()
    process = subprocess.Popen(
        suite.command,
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
        return Ended(suite, process.wait(), lines, time.monotonic() - begin)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        ended.set()
        watcher.join()
        _running.discard(process.pid)


def title(suite: Suite) -> None:
    """Say what follows."""
    print(f"\n== {suite.name}: {' '.join(suite.command)}", flush=True)


def all_of(chosen: list[Suite]) -> Iterable[Ended]:
    """Run all, in their two lanes, and give each as soon as it has ended and been shown."""
    aside = [suite for suite in chosen if suite.name == ASIDE]
    others = [suite for suite in chosen if suite.name != ASIDE]
    if not others:
        others, aside = aside, []
    with ThreadPoolExecutor(1) as lane:
        waiting = [lane.submit(run, suite, lambda _line: None) for suite in aside]
        try:
            for suite in others:
                title(suite)
                yield run(suite, lambda line: print(line, flush=True))
            for one in waiting:
                ended = one.result()
                title(ended.suite)
                print("\n".join(ended.lines), flush=True)
                yield ended
        except BaseException:
            for group in [*_running]:
                os.killpg(group, signal.SIGTERM)
            raise


def verdict(ended: Ended) -> Count:
    """The count of a suite, made honest where its command failed or nothing ran."""
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


def main(names: list[str]) -> int:
    """Run the named suites, or all of them; the exit status is 1 when anything failed."""
    if unknown := set(names) - {suite.name for suite in SUITES}:
        print(f"no such suite: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    TOTAL.unlink(missing_ok=True)
    table, failures, total = [], [], Count()
    for ended in all_of([suite for suite in SUITES if not names or suite.name in names]):
        count = verdict(ended)
        what = str(count) if ended.suite.count or count.failed else "clean (tests counted above)"
        table.append(f"{ended.suite.name:<9} {what}  [{ended.took_s:.0f} s]")
        failures += [f"{ended.suite.name}: {line}" for line in ended.failures()]
        total += count
    if failures:
        print("\n== what failed\n" + "\n".join(failures))
    print("\n" + "\n".join(table))
    TOTAL.parent.mkdir(exist_ok=True)
    TOTAL.write_text(f"{total}\n")
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
