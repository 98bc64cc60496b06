"""``python -m gpubench.worker JOB.json``: run one row in this process.

SIGABRT writes the stacks of all threads to the file ``JOB.stacks`` and ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from pathlib import Path

from gpubench.job import Job
from gpubench.work import run_row


def main() -> None:
    """Run the row, and end without waiting for threads and hooks of baselines."""
    path = Path(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with path.with_suffix(".stacks").open("w", encoding="utf-8") as stacks:
        faulthandler.enable(stacks)
        run_row(Job.read(path))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
