"""``deepnvme`` and ``python -m deepnvme``: the command line, which is the same as the Rust binary's."""

import signal
import sys
from types import FrameType

from deepnvme._deepnvme import _command


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit status: 0, 1 or 2."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _command(sys.argv[1:])
    except KeyboardInterrupt:
        # The command has removed its files and said so.
        return 1


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does: no file stays behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
