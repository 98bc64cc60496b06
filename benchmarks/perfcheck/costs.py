"""``python -m perfcheck.costs``: what a gigabyte costs, for deepnvme and its peers.

Counted for each operation: system calls, page faults, bytes copied for each byte moved, seconds of CPU, and
for deepnvme the engine's requests and ops. Each runs in processes of its own, on a cold file: measured in
``--rounds`` of them, and once more with its system calls counted by strace. Counts of calls and faults hardly
depend on the machine; times do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any

from common import cache, command
from perfcheck.costs_child import COUNT, ELEMENTS, OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

_GB = COUNT * ELEMENTS * 4 / 1e9
_TOTAL = re.compile(r"^100\.00\s+\S+\s+(?:\S+\s+)?(\d+)\s+(?:\d+\s+)?total$", re.MULTILINE)
_FIO = ("fio", "--name=cost", "--direct=1", "--ioengine=io_uring", "--bs=1M", "--iodepth=32", "--thread")


class Child:
    """A prepared process."""

    def __init__(self, operation: str, tool: str, folder: Path) -> None:
        words = [sys.executable, "-m", "perfcheck.costs_child", operation, tool, str(folder)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self._answer()
        for file in folder.iterdir():
            if operation != "save" and file.is_file():
                cache.make_cold(file)

    def _answer(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"exit {self._process.wait()}")
        return line

    def _go_on(self) -> None:
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None  # noqa: S101 - it is a pipe
        pipe.write("\n")
        pipe.flush()

    def work(self) -> dict[str, float]:
        """Let it work, and return its usage."""
        self._go_on()
        usage: dict[str, float] = json.loads(self._answer())
        return usage

    def end(self) -> None:
        """Let it end."""
        self._go_on()
        self._process.wait()


def count_calls(pid: int, work: Callable[[], object]) -> int | None:
    """Return the system calls of a process and its threads while `work` runs, or None without strace."""
    if shutil.which("strace") is None:
        return None
    counts = Path(tempfile.mkstemp()[1])
    words = ["strace", "--follow-forks", "--summary-only", f"--output={counts}", f"--attach={pid}"]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None  # noqa: S101 - it is a pipe
    tracer.stderr.readline()  # that it is attached
    work()
    tracer.send_signal(signal.SIGINT)
    tracer.communicate()
    return _total_of(counts)


def _total_of(counts: Path) -> int | None:
    """Return the total of strace's table, and remove the table."""
    found = _TOTAL.search(counts.read_text(encoding="utf-8"))
    counts.unlink()
    return int(found[1]) if found else None


def measure(operation: str, tool: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the costs of an operation for each gigabyte of its data."""
    used: list[dict[str, float]] = []
    for _ in range(rounds):
        child = Child(operation, tool, folder)
        used.append(child.work())
        child.end()
    child = Child(operation, tool, folder)
    calls = count_calls(child.pid, child.work)
    child.end()
    cost: dict[str, Any] = {name: median(one[name] for one in used) / _GB for name in used[0]}
    cost["calls"] = None if calls is None else calls / _GB
    cost["copied"] = cost.pop("bytes_bounced") / 1e9 if "bytes_bounced" in cost else None
    return cost


def fio_costs(direction: str, folder: Path) -> dict[str, Any]:
    """Return the costs of fio's process, with its start, which makes a few thousand calls.

    Its page faults are not counted.
    """
    job = [f"--rw={direction}", f"--filename={folder / 'raw'}", f"--size={COUNT * ELEMENTS * 4}"]
    subprocess.run([*_FIO, *job], check=True, capture_output=True)
    before = os.times()
    subprocess.run([*_FIO, *job], check=True, capture_output=True)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    cost: dict[str, Any] = {"cpu_s": cpu_s / _GB, "copied": 0.0, "calls": None, "faults": None}
    if shutil.which("strace") is not None:
        counts = Path(tempfile.mkstemp()[1])
        traced = ["strace", "--follow-forks", "--summary-only", f"--output={counts}", *_FIO, *job]
        subprocess.run(traced, check=True, capture_output=True)
        if (calls := _total_of(counts)) is not None:
            cost["calls"] = calls / _GB
    return cost


def line(name: str, cost: dict[str, Any]) -> str:
    """Return one row of the table."""

    def number(key: str, form: str) -> str:
        value = cost.get(key)
        return "-" if value is None else format(value, form)

    columns = (("cpu_s", ".3f"), ("calls", ".0f"), ("faults", ".0f"), ("ops", ".0f"), ("copied", ".2f"))
    return f"{name:24}" + "".join(f"{number(key, form):>12}" for key, form in columns)


def main() -> int:
    """Print a table, and write it as a record."""
    parser = argparse.ArgumentParser(
        prog="perfcheck.costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(parser, rounds=3)
    chosen = parser.parse_args()
    costs: dict[str, dict[str, Any]] = {}
    print(f"{'for each GB':24}{'CPU s':>12}{'calls':>12}{'faults':>12}{'ops':>12}{'copied':>12}")
    with command.scratch_folder(chosen.scratch, "costs") as scratch:
        for operation, tools in OPERATIONS.items():
            for tool in tools:
                costs[f"{operation}, {tool}"] = measure(operation, tool, scratch, chosen.rounds)
                print(line(f"{operation}, {tool}", costs[f"{operation}, {tool}"]), flush=True)
        if shutil.which("fio") is not None:
            for direction in ("write", "read"):
                costs[f"{direction}, fio"] = fio_costs(direction, scratch)
                print(line(f"{direction}, fio", costs[f"{direction}, fio"]), flush=True)
        fields = {"gigabytes": _GB, "load": os.getloadavg()[0], "costs": costs}
        path = command.write_record(chosen.results, "costs", scratch, fields)
    print(f"{time.strftime('%F')}: written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
