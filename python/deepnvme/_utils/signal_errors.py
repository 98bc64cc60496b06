"""Tells the exceptions of signal handlers from those of the interrupted code.

A handler may raise any exception, in the middle of any call. Code that turns failures of its own calls into other
errors, or goes on after them, must let those of a handler through.
"""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler of this process, as it is installed now, has raised an exception."""
    codes = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    traceback = error.__traceback__ if codes else None
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a handler that is written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    # Of an object that is called: a method of its class.
    classes = type(handler).__mro__
    called = next((vars(one)["__call__"] for one in classes if "__call__" in vars(one)), None)
    for found in (handler, getattr(handler, "__func__", None), called):
        if (code := getattr(found, "__code__", None)) is not None:
            return code  # type: ignore[no-any-return]
    return None
