"""Make a system call on one folder fail in this process, with a seccomp filter. It needs no root.

Another process decides about each call, since only the descriptor tells which folder it is about.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path

from call_filter import answer_one, install

# Of x86-64.
CALLS = {"getdents64": 217, "close": 3}


def fail(call: str, folder: Path, error: int) -> None:
    """Return in a forked child, in which this call on this folder fails. The parent ends with the child's status."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        # The parent's alarm does not count here.
        signal.alarm(60)
        listener = install([CALLS[call]])
        socket.send_fds(theirs, [b"x"], [listener])
        # The parent has it.
        theirs.recv(1)
        return
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if descriptors:
        ours.send(b"x")
        _decide(descriptors[0], child, folder.resolve(), error)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)


def _decide(listener: int, child: int, folder: Path, error: int) -> None:
    """Answer each call until the child ends."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while True:
        ((_, events),) = waiting.poll()
        if not events & select.POLLIN:
            return
        answer_one(listener, lambda descriptor: error if _folder_of(child, descriptor) == folder else 0)


def _folder_of(pid: int, descriptor: int) -> Path | None:
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))  # noqa: PTH115 (it is no path)
    except OSError:
        return None
