"""``deepnvme`` and ``python -m deepnvme``: the same command line as the Rust binary's."""

import os
import signal
import sys
from types import FrameType

from deepnvme._deepnvme import _command, _python_command


def main() -> int:
    """Run the command of ``sys.argv``. Exit status: 0 success, 1 failure, 2 usage error."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        # Commands that need models run in Python. Rust parses their arguments with those of the others.
        found = _python_command(sys.argv[1:])
        if found is not None:
            # Before torch is imported. Its idle threads spin for milliseconds, even during waits for layers. This
            # shorter time covers the gaps within a layer.
            os.environ.setdefault("GOMP_SPINCOUNT", "3000")
            from deepnvme._stream import commands  # noqa: PLC0415

            return commands.run(*found)
        return _command(sys.argv[1:])
    except KeyboardInterrupt:
        # The command has removed its files and printed a message.
        return 1


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End like Ctrl-C, so that no file is left behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
