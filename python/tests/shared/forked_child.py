"""Run a function in a forked child of the test's own process. Standard library only."""

from __future__ import annotations

import os
import signal
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# The exit status of a child whose function has raised an exception.
RAISED = 3
_SECONDS_MAX = 60


def status_of_child(work: Callable[[], int | None]) -> int:
    """Run a function in a forked child. Returns the exit status: what the function returns, negative for a signal."""
    child = os.fork()
    if child == 0:
        status: int | None = RAISED
        try:
            signal.alarm(_SECONDS_MAX)  # one that hangs ends
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
