"""``deepnvme`` and ``python -m deepnvme``: the command line, which is the same as the Rust binary's."""

import os
import signal
import sys
from types import FrameType

from deepnvme._deepnvme import _command, _python_command


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit status: 0, 1 or 2."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        # Models need Python; what may be typed stands with the other commands, in Rust.
        found = _python_command(sys.argv[1:])
        if found is not None:
            # Before torch comes. Its threads spin for milliseconds when they have done their part, and so while layers
            # are waited for; as short a while as this bridges what lies within a layer.
            os.environ.setdefault("GOMP_SPINCOUNT", "3000")
            from deepnvme._stream import commands  # noqa: PLC0415

            return commands.run(*found)
        return _command(sys.argv[1:])
    except KeyboardInterrupt:
        # The command has removed its files and said so.
        return 1


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does: no file stays behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
