"""Finds the best of several settings by one trial each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

_Setting = TypeVar("_Setting")
# No other setting is tried after this time.
_TRIAL_S = 15.0


def best(
    settings: Sequence[_Setting],
    prepare: Callable[[_Setting], Callable[[], object]],
    reset: Callable[[], None],
) -> _Setting:
    """Return the setting that was quickest in one trial each, after one that is not counted.

    Args:
        settings: the candidates.
        prepare: returns the action of a setting.
        reset: called before each trial that counts; not timed.
    """
    end = time.monotonic() + _TRIAL_S
    prepare(settings[0])()
    took: dict[int, float] = {}
    for index, setting in enumerate(settings):
        if took and time.monotonic() > end:
            break
        reset()
        action = prepare(setting)
        start = time.perf_counter()
        action()
        took[index] = time.perf_counter() - start
    return settings[min(took, key=lambda index: took[index])]
