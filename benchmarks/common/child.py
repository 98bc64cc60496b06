"""A process that answers requests, for tools that must not share one.

The protocol is JSON: one request per line of standard input, one reply per line of standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from common.not_offered import NotOffered

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Of its standard error, for the message when it has ended. The log goes with the scratch folder.
_LOG_END = 2000
_CLOSE_S = 60


class Child:
    """A handle of the process.

    Args:
        *arguments: of ``python -m``: its module, whose ``main`` calls `serve`, and the module's arguments.
        log: the file for its standard error. Default: that of this process.
    """

    def __init__(self, *arguments: str, log: Path | None = None) -> None:
        self._log = log
        command = [sys.executable, "-m", *arguments]
        if log is None:
            self._process = self._start(command, None)
        else:
            with log.open("w") as errors:
                self._process = self._start(command, errors)

    @staticmethod
    def _start(command: list[str], errors: TextIO | None) -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have it answer a request.

        Raises:
            NotOffered: the tool cannot, and why.
            RuntimeError: it failed, or it has ended.
        """
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline() if self._process.stdout else ""
        except BrokenPipeError:
            line = ""
        if not line:
            said = "" if self._log is None else f": {self._log.read_text(errors='replace')[-_LOG_END:]}"
            raise RuntimeError(f"its process has ended{said}")
        answer: dict[str, Any] = json.loads(line)
        if "not_offered" in answer:
            raise NotOffered(answer["not_offered"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def close(self) -> None:
        """Let it end, and kill it if it hangs then."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def attempt(work: Callable[[], dict[str, Any]], *, prints: bool) -> dict[str, Any]:
    """Do the work. Returns its answer, or the one that `Child.ask` raises as an error, which `prints` prints."""
    try:
        return work()
    except NotOffered as reason:
        return {"not_offered": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever a baseline throws is an answer
        if prints:
            sys.excepthook(type(error), error, error.__traceback__)
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def serve(made: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer requests until there are none, and end the process. `made` returns the function that answers one."""
    # Output that a library prints must not mix with the replies.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = made()
    for line in sys.stdin:
        print(json.dumps(attempt(partial(answer, json.loads(line)), prints=True)), file=answers, flush=True)
    # Threads and hooks of baselines have been seen to hang at the end of a process that has nothing to lose.
    os._exit(0)
