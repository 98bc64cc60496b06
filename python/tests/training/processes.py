"""Run programs in processes of their own, forked from one that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_FORKS = multiprocessing.get_context("forkserver")
# The first step of an optimizer imports more than torch itself.
_FORKS.set_forkserver_preload(["deepnvme._checkpoint.checkpointer", "deepnvme.optim", "torch._dynamo"])

# This folder, and this process's `sys.path`.
_PATHS = [str(Path(__file__).parent), *(os.path.abspath(path) for path in sys.path if path)]  # noqa: PTH100
_TIMEOUT_S = 100

_STARTUP = """
import atexit, os, signal, sys, traceback
signal.alarm(2 * timeout_s)
sys.path[:] = paths + sys.path
os.chdir(folder)
for number in (1, 2):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
status = 1
try:
    exec(code, {"__name__": "__main__", "send": sender.send})
    atexit._run_exitfuncs()
    status = 0
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


class Child:
    """A running program. It calls ``send`` with messages, which :meth:`receive` waits for.

    Args:
        code: the program.
        folder: its working directory.
        output: the file for its output.
    """

    def __init__(self, code: str, folder: Path, output: Path) -> None:
        self._receiver: Connection
        self._receiver, sender = _FORKS.Pipe(duplex=False)
        names: dict[str, object] = {"code": code, "paths": _PATHS, "folder": str(folder), "output": str(output)}
        names |= {"sender": sender, "timeout_s": _TIMEOUT_S}
        self._output = output
        self._process = _FORKS.Process(target=exec, args=(_STARTUP, names))
        self._process.start()
        sender.close()

    def receive(self) -> object:
        """Wait for a message."""
        assert self._receiver.poll(_TIMEOUT_S), "it sends no message"
        try:
            return self._receiver.recv()
        except EOFError:
            raise AssertionError(f"it has ended: {self.printed()}") from None

    def printed(self) -> str:
        """Return its output so far."""
        return self._output.read_text() if self._output.exists() else ""

    def kill(self) -> None:
        """Kill it at once, as ``kill -9`` does."""
        self._process.kill()
        self._process.join(_TIMEOUT_S)

    def close(self) -> None:
        """Clean up."""
        self._receiver.close()
        self._process.close()

    def wait(self) -> str:
        """Wait until it ends successfully. Return its output."""
        self._process.join(_TIMEOUT_S)
        status = self._process.exitcode
        assert status is not None, f"it hangs: {self.printed()}"
        assert status == 0, f"status {status}: {self.printed()}"
        return self.printed()


@contextmanager
def child(code: str, folder: Path) -> Iterator[Child]:
    """Run a program in `folder` for the length of the block; kill it afterwards if it still runs."""
    started = Child(code, folder, folder.with_name(folder.name + ".output"))
    try:
        yield started
    finally:
        started.kill()
        started.close()


def run(code: str, folder: Path) -> str:
    """Run a program to its end. Return its output."""
    with child(code, folder) as started:
        return started.wait()
