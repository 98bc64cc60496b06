"""The judge of blocking calls: what is late fails, and what lacked a CPU does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .attempts import Attempts
from .fork_server import ForkServer

# The folder is the number of the attempt.
LATE = "event_times.append(time.monotonic())\nif {}:\n    time.sleep(1.2)\ncheck_time()\nos._exit(0)"
NUMBER = "int(os.path.basename(os.getcwd()))"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Start a server without torch."""
    found = ForkServer(tmp_path_factory.mktemp("settings"), has_torch=False)
    yield found
    found.close()


def attempts(server: ForkServer, folder: Path, program: str, *, is_exit: bool = False) -> list[str]:
    """Run a program until it is judged. Return the names of the attempts that were in time."""
    judge = Attempts(server, folder, measures_exit=True)
    return [found.name for found in judge.until_judged(program, is_exit=is_exit)]


@pytest.mark.parametrize(
    "is_late", ["True", f"{NUMBER} != 1", f"{NUMBER} % 2 == 0"], ids=["always", "mostly", "every-second-time"]
)
def test_a_call_that_is_often_late_fails(server: ForkServer, tmp_path: Path, is_late: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"longer than 1\.0 s, 3 times of"):
        attempts(server, tmp_path, LATE.format(is_late))


def test_a_call_that_is_late_once_is_judged_by_more_attempts(server: ForkServer, tmp_path: Path) -> None:
    assert attempts(server, tmp_path, LATE.format(f"{NUMBER} == 0")) == ["1", "2"]


def test_an_exit_that_is_late_fails(server: ForkServer, tmp_path: Path) -> None:
    program = "exit_checks.append(lambda: time.sleep(1.2))\nleave(lambda: None, at(0))"
    with pytest.raises(pytest.fail.Exception, match="longer than"):
        attempts(server, tmp_path, program, is_exit=True)


def test_time_without_a_cpu_does_not_count(server: ForkServer, tmp_path: Path) -> None:
    # Five processes share one CPU, and the call needs a third of a second of it.
    program = """
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
others = []
for _ in range(4):
    others.append(os.fork())
    if others[-1] == 0:
        signal.alarm(20)
        while True:
            pass
event_times.append(time.monotonic())
while time.thread_time() < 0.35:
    pass
took = time.monotonic() - event_times[0]
for other in others:
    os.kill(other, signal.SIGKILL)
assert took > 1, took
check_time()
os._exit(0)
"""
    assert len(attempts(server, tmp_path, program)) in (1, 2)
