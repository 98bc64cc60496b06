"""Programs to be killed. They are forked from one that has imported torch, since that takes longest."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .ranks import FORKS

if TYPE_CHECKING:
    from collections.abc import Iterator

# A hanging program is killed, which also ends its output and the test that reads it.
_PATIENCE_S = 100

_BOOT = """
import os, signal, sys, traceback
signal.alarm(patience_s)
sys.argv = ["-c", *arguments]
sys.stdout = os.fdopen(os.dup(said.fileno()), "w")
said.close()
try:
    exec(code, {"__name__": "__main__"})
except SystemExit:
    raise
except BaseException:
    # Whoever reads the output shows why it is not what was expected.
    traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()
    raise
sys.stdout.flush()
os._exit(0)
"""


class Program:
    """A faster equivalent of ``python -c code arguments``.

    Args:
        code: the program; an exception ends it with status 1.
        *arguments: its arguments.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        hearing, saying = FORKS.Pipe(duplex=False)
        names = {"code": code, "arguments": [*map(str, arguments)], "said": saying, "patience_s": _PATIENCE_S}
        self._process = FORKS.Process(target=exec, args=(_BOOT, names))
        self._process.start()
        saying.close()
        # The file closes the connection's descriptor.
        self.stdout = os.fdopen(os.dup(hearing.fileno()), encoding="utf-8")
        hearing.close()

    @property
    def is_running(self) -> bool:
        """Whether it is still running."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """Kill it immediately, like ``kill -9``."""
        self._process.kill()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until it ends. Returns its exit status, negative for a signal."""
        self._process.join(_PATIENCE_S)
        status = self._process.exitcode
        assert status is not None, "it hangs"
        return status


@contextmanager
def program(code: str, *arguments: object) -> Iterator[Program]:
    """Run a program during a block, and wait for its end."""
    started = Program(code, *arguments)
    try:
        yield started
    except BaseException:
        started.kill()
        raise
    finally:
        started.stdout.close()
        try:
            started.wait()
        finally:
            # The interpreter would wait for it at exit.
            started.kill()


def run(code: str, *arguments: object) -> int:
    """Run a program. Returns its exit status."""
    with program(code, *arguments) as started:
        started.stdout.read()
        return started.wait()
