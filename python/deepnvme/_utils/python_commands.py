"""The end of a command that runs in Python: its options from JSON, and its errors as sentences with an exit status."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from deepnvme._utils.terminal import OutputError, printable, show
from deepnvme.errors import Error, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

_PATHS = ("model", "prompt_file", "folder", "trace", "source", "target")


def report_errors(command: Callable[[dict[str, Any]], int], options: str) -> int:
    """Run a command with its options as JSON; the exit status: 0 success, 1 failure, 2 usage error."""
    parsed = {name: _path(value) if name in _PATHS else value for name, value in json.loads(options).items()}
    try:
        return command(parsed)
    except BrokenPipeError:
        # The reader has closed the pipe on purpose.
        return 0
    except ImportError as error:
        return _refused(f"{error}; install it: {sys.executable} -m pip install torch transformers", 1)
    except (Error, MemoryError, OSError, OutputError, ValueError) as error:
        # Errors of files, such as CorruptFileError, are also ValueErrors.
        is_usage = isinstance(error, InvalidArgumentError if isinstance(error, Error) else ValueError)
        return _refused(str(error), 2 if is_usage else 1)


def _path(value: Any) -> Any:
    """Decode a path. JSON carries paths that are not UTF-8 as lists of bytes."""
    return os.fsdecode(bytes(value)) if isinstance(value, list) else value


def _refused(text: str, status: int) -> int:
    lines = map(printable, text.split("\n"))
    show("deepnvme: " + "\n  ".join(lines) + "\n")
    return status
