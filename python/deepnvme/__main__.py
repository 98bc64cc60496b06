"""The command line ``deepnvme`` and ``python -m deepnvme``: the same as the Rust binary's."""

import os
import signal
import sys
from types import FrameType

from deepnvme._deepnvme import _python_command, _run_command
from deepnvme._utils.terminal import show


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit status: 0 success, 1 failure, 2 usage error."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        # Commands that need torch run in Python. Rust parses the arguments of all commands.
        command = _python_command(sys.argv[1:])
        if command is not None:
            # Set before torch is imported. Idle OpenMP threads of torch spin for milliseconds by default, even while
            # layers are read from disk. This shorter spin only bridges the gaps within a layer.
            os.environ.setdefault("GOMP_SPINCOUNT", "3000")
            try:
                import torch  # noqa: F401, PLC0415
            except ModuleNotFoundError as error:
                sys.stderr.write(f"deepnvme: {error}; install it: {sys.executable} -m pip install torch transformers\n")
                return 1
            if command[0] == "demo":
                from deepnvme._demo import command as demo  # noqa: PLC0415

                return demo.run(command[1])
            if command[0].startswith("rows "):
                from deepnvme._rows import commands as rows  # noqa: PLC0415

                return rows.run(*command)
            from deepnvme._stream import commands  # noqa: PLC0415

            return commands.run(*command)
        return _run_command(sys.argv[1:])
    except KeyboardInterrupt:
        # Rust's commands report it themselves.
        show("deepnvme: interrupted; the temporary files have been removed\n")
        return 1


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End like Ctrl-C: no file stays behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
