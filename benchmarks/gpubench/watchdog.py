"""Runs each row in a process of its own, and kills a row that hangs. Its rounds so far remain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gpubench.job import Job
from gpubench.rows import RowResult

#: The program of a row's process. Its argument is the file of the job.
COMMAND = [sys.executable, "-m", "gpubench.worker"]

_POLL_S = 0.1
_END_S = 10.0
_STACKS_CHARACTERS_MAX = 6000


@dataclass(frozen=True)
class Limits:
    """Seconds that a row, and a turn in it, may take. After that the row is killed."""

    row_s: float
    turn_s: float


def run(job: Job, folder: Path, limits: Limits) -> tuple[RowResult, dict[str, object]]:
    """Run a row, and return it with the description of the GPU.

    A tool that hangs or crashes before its row has any result is left out, and the row begins again without it.
    """
    end = time.monotonic() + limits.row_s
    skip: dict[str, str] = {}
    stacks = ""
    while True:
        job = replace(job, skip=skip)
        why, dumped = _attempt(job, folder, end, limits.turn_s)
        stacks += dumped
        row, facts = job.row(), job.gpu_facts()
        row.stacks = stacks
        if not why:
            return row, facts
        print(f"{job.key}: {why}", file=sys.stderr, flush=True)
        if row.tool and row.tool not in skip and not row.samples and time.monotonic() < end:
            skip = {**row.left_out, row.tool: why}
            continue
        if row.samples:
            why += "; its rounds so far are kept"
        if row.ours in row.samples and row.groups.get(row.tool, "deepnvme") != "deepnvme":
            # A baseline that hangs says nothing about deepnvme.
            row.note(why)
        else:
            row.failure = why
        return row, facts


def _attempt(job: Job, folder: Path, end: float, turn_s: float) -> tuple[str, str]:
    """Run the row's process once. Returns why it ended early, or an empty text, and the stacks of its threads."""
    path = folder / f"{job.key}.json"
    Path(job.row_path).unlink(missing_ok=True)
    job.write(path)
    began = time.monotonic()
    process = subprocess.Popen([*COMMAND, str(path)], start_new_session=True)
    try:
        why = ""
        while process.poll() is None and not why:
            time.sleep(_POLL_S)
            row, now = job.row(), time.monotonic()
            if now > end:
                why = f"killed after {now - began:.0f} s, the limit of a row, at: {row.activity}"
            elif row.tool and now - row.since > turn_s:
                why = f"killed after {now - row.since:.0f} s, the limit of a turn, at: {row.activity}"
        if why:
            # faulthandler writes the stacks.
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
    finally:
        _kill(process)
    stacks = path.with_suffix(".stacks")
    said = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
    if not why and process.returncode:
        code = process.returncode
        ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        why = f"its process {ended} at: {job.row().activity}"
    # The rest lists extension modules.
    return why, said.partition("Extension modules")[0].strip()[:_STACKS_CHARACTERS_MAX]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that the kernel does not let go must not stop the other rows.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
