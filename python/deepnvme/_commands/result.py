"""Run a command of the command line, and return its result."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from deepnvme._deepnvme import _command_result
from deepnvme._utils.public import public
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_OPTION = re.compile(r"--([a-z-]+)([= ]?<[A-Z_]+>)?")


@public
class CommandResult(dict[str, Any]):
    """The result of a command: a dict with the fields of its ``--json``. ``str`` gives the text of the command.

    Example:
        >>> result = deepnvme.report(".")
        >>> sorted(result)[:3], str(result).startswith("deepnvme")
        (['backends', 'findings', 'folders'], True)
    """

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text


def options(valued: dict[str, int | str | None], flags: dict[str, bool]) -> Iterator[str]:
    """Yield command line options: those with a value that is not ``None``, and the flags that are set."""
    yield from (f"--{name}={value}" for name, value in valued.items() if value is not None)
    yield from (f"--{name}" for name, is_set in flags.items() if is_set)


def run(*arguments: str) -> CommandResult:
    """Run ``deepnvme ARGUMENTS...``. A usage error names the Python argument."""
    try:
        fields, text = _command_result(list(arguments))
    except InvalidArgumentError as error:
        if error.filename is not None:  # It is about a file, and not about an argument.
            raise
        # The first paragraph is the reason. The others tell how to use the command.
        reason = " ".join(str(error).removeprefix("error: ").partition("\n\n")[0].split())
        named = _OPTION.sub(lambda option: option[1].replace("-", "_"), reason)
        raise InvalidArgumentError(named) from None
    return CommandResult(json.loads(fields), text)
