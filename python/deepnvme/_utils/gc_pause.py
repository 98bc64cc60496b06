"""Pauses of Python's cycle collector.

Describing ten thousand tensors makes ten thousand objects that all stay. Searching them, and then the whole process,
for garbage takes several times as long as making them.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from deepnvme._deepnvme import _end_gc_pauses, _GcPause

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")

os.register_at_fork(after_in_child=_end_gc_pauses)

# For `with` blocks.
GcPause = _GcPause


def gc_paused(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function run in a pause of the collector."""

    @wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        with GcPause():
            return function(*arguments, **keywords)

    return call
