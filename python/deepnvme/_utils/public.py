"""The public side of functions: the module that they name, checks of their arguments, and their messages."""

from __future__ import annotations

import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from deepnvme._deepnvme import Engine, StripeSet, _parse_bytes
from deepnvme._utils.interrupts import is_of_handler
from deepnvme.errors import InvalidArgumentError, NotFoundError

_T = TypeVar("_T")
# Frames between a warning and the user's code: decorators of the package are made by contextlib.
_OURS = ("deepnvme", "contextlib")
# How many names a message lists.
_LISTED_MAX = 8
# The largest size of a file or of memory.
WHOLE_MAX = (1 << 63) - 1
# Characters of an invalid value that a message shows.
_SHOWN_MAX = 100
# As a local path, ``s3://bucket`` would be a new folder here, and the bucket would stay empty.
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]+://")
_LOCAL_ONLY = "deepnvme reads and writes local files: pass the path of a local or mounted folder"


def public(thing: _T) -> _T:
    """Make a function or class say that it belongs to ``deepnvme``, in its text, in help, tracebacks and pickles."""
    return public_in("deepnvme")(thing)


def public_in(module: str) -> Callable[[_T], _T]:
    """Make a function or class say that it belongs to a public module."""

    def mark(thing: _T) -> _T:
        thing.__module__ = module
        return thing

    return mark


def warn_caller(message: str) -> None:
    """Warn with the line of the user's code that called the package."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def first_of(names: Sequence[object]) -> str:
    """List names, or the first of many: a file may have any number of them."""
    more = len(names) - _LISTED_MAX
    return ", ".join(map(str, names[:_LISTED_MAX])) + (f" and {more} more" if more > 0 else "")


def names_text(names: Sequence[str]) -> str:
    """List names in quotation marks, or the first of many."""
    return first_of([*map(repr, names)]) or "none"


def whole(value: object, name: str, low: int = 0, high: int = WHOLE_MAX, *, otherwise: str = "") -> int:
    """Convert an argument to a whole number. Whole numbers go through here, or through the same check in Rust.

    Args:
        value: the argument.
        name: its name, for the message.
        low: the smallest allowed value.
        high: the largest allowed value.
        otherwise: other allowed values, for the message: "None to keep all".

    Raises:
        InvalidArgumentError: it is outside the range.
        TypeError: it is not an integer, but a float, a bool or a str.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is not None and low <= number <= high:
        return number
    # The default maximum is shown only if the number exceeds it.
    is_too_large = number is not None and number > high
    limits = f"between {low} and {high}" if is_too_large or high != WHOLE_MAX else f"of at least {low}"
    text = f"{name} is {shown(value)}; it must be a whole number {limits}{f', or {otherwise}' if otherwise else ''}"
    if number is None:
        raise TypeError(text)
    raise InvalidArgumentError(text)


def parse_bytes(size: object, name: str = "memory") -> int:
    """Parse a number of bytes, at least one. All size arguments go through here, or through the same parser in Rust.

    ``"4GB"`` is 4 x 10^9 bytes, ``"4GiB"`` is 4 x 2^30. A bare letter (``"4G"``) is binary, as in fio and dd.

    Args:
        size: the argument.
        name: its name, for the message.

    Raises:
        InvalidArgumentError: the text is not a size, or the number is outside the range.
        TypeError: it is neither an integer nor a str.
    """
    return _parse_bytes(size, name)


DURABILITIES = ("none", "data", "full")


def check_engine(engine: object) -> None:
    """Raise ``TypeError`` unless an argument is an engine, or ``None``."""
    if engine is not None and not isinstance(engine, Engine):
        msg = f"engine is {shown(engine)}; it must be a deepnvme.Engine, or None for the default engine"
        raise TypeError(msg)


def check_flag(value: object, name: str) -> None:
    """Raise ``TypeError`` unless an argument is True or False."""
    if not isinstance(value, bool):
        msg = f"{name} is {shown(value)}; it must be True or False"
        raise TypeError(msg)


def check_choice(value: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise ``TypeError`` unless an argument is a str, and ``ValueError`` unless it is one of these."""
    if not isinstance(value, str) or value not in choices:
        words = ", ".join(map(repr, choices[:-1]))
        msg = f"{name} is {shown(value)}; it must be {words} or {choices[-1]!r}"
        raise TypeError(msg) if not isinstance(value, str) else InvalidArgumentError(msg)


def check_file_path(path: object, function: str, remedy: str) -> None:
    """Raise ``TypeError`` unless an argument is a path or a stripe set.

    Args:
        path: the argument.
        function: the public function that got it, for the message.
        remedy: a call for file objects, for the message.
    """
    if isinstance(path, (str, bytes, os.PathLike, StripeSet)):
        return
    kind = type(path).__name__
    if hasattr(path, "read") or hasattr(path, "write"):
        msg = f"deepnvme.{function} takes the path of a file, not an open file ({kind}); give it the path, or {remedy}"
    else:
        msg = f"deepnvme.{function} takes a path (str, bytes, os.PathLike) or a StripeSet, not {kind}"
        if function == "save":
            msg += "; the state comes first: save(state, path)"
    raise TypeError(msg)


def shown(value: object) -> str:
    """Return the text of an invalid value for an error, shortened."""
    try:
        text = repr(value)
    except Exception as error:  # the error about the argument counts
        if is_of_handler(error):
            raise
        # Python refuses to print numbers of thousands of digits.
        is_long = isinstance(value, int)
        return "a number of thousands of digits" if is_long else f"an object of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


def to_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """Convert a path of any type to a ``Path``.

    Raises:
        InvalidArgumentError: it is an empty text, which ``pathlib`` would take for the current folder, or no file can
            have this name.
        TypeError: it is not a path.
    """
    try:
        name = os.fsdecode(path)
    except TypeError as error:
        msg = f"the path is {shown(path)}; it must be str, bytes or os.PathLike"
        raise TypeError(msg) from error
    if not name:
        msg = "the path is empty; name a file or a folder ('.' is the current folder)"
        raise InvalidArgumentError(msg)
    if "\0" in name:
        raise InvalidArgumentError(f"the path {name!r} has a null byte in it; no file has such a name")
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        msg = f"the path {name!r} has a lone surrogate in it; no file has such a name"
        raise InvalidArgumentError(msg) from error
    if _URL.match(name):
        raise InvalidArgumentError(f"the path {name!r} is a URL; {_LOCAL_ONLY}")
    return Path(name)


def to_absolute_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """Convert a path of any type to an absolute ``Path``, so that it stays the same if the current folder changes.

    Raises:
        NotFoundError: it is relative, and the current folder was removed.
        InvalidArgumentError, TypeError: as for ``to_path``.
    """
    given = to_path(path)
    try:
        return given.absolute()
    except FileNotFoundError as error:
        msg = f"{given}: the current folder was removed; pass an absolute path, or change to another folder"
        raise NotFoundError(error.errno, msg) from error
