"""Programs that are killed: forked from one that has imported torch, which takes longest."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .ranks import FORKS

if TYPE_CHECKING:
    from collections.abc import Iterator

# A program that hangs is killed, which also ends its output, and whoever reads that.
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
    """What ``python -c code arguments`` would be, a second or two sooner.

    Args:
        code: the program; an exception ends it with status 1.
        *arguments: of the program.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        hearing, saying = FORKS.Pipe(duplex=False)
        names = {"code": code, "arguments": [*map(str, arguments)], "said": saying, "patience_s": _PATIENCE_S}
        self._process = FORKS.Process(target=exec, args=(_BOOT, names))
        self._process.start()
        saying.close()
        # The file closes what the connection had.
        self.stdout = os.fdopen(os.dup(hearing.fileno()), encoding="utf-8")
        hearing.close()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """End it at whatever it does, as ``kill -9`` does."""
        self._process.kill()

    def wait(self) -> int:
        """Wait for its end; its status, or less than 0 where a signal ended it."""
        self._process.join(_PATIENCE_S)
        status = self._process.exitcode
        assert status is not None, "it hangs"
        return status


@contextmanager
def program(code: str, *arguments: object) -> Iterator[Program]:
    """Have a program that runs beside a block, and has ended after it."""
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
            # At its end, the interpreter would wait for it.
            started.kill()


def run(code: str, *arguments: object) -> int:
    """Run a program; return its status."""
    with program(code, *arguments) as started:
        started.stdout.read()
        return started.wait()
