"""Finds the best of several settings by one trial each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from common import cache

_Setting = TypeVar("_Setting")
# No other setting is tried after this time.
_TRIAL_S = 15.0


def best(
    settings: Sequence[_Setting], prepare: Callable[[_Setting], Callable[[], object]], path: Path, *, cold: bool
) -> _Setting:
    """Return the setting that was quickest in one trial each, after one that is not counted."""
    end = time.monotonic() + _TRIAL_S
    prepare(settings[0])()
    took: dict[int, float] = {}
    for index, one in enumerate(settings):
        if took and time.monotonic() > end:
            break
        if cold:
            cache.make_cold(path)
        else:
            path.unlink(missing_ok=True)
            cache.wait_for_writeback()
        action = prepare(one)
        start = time.perf_counter()
        action()
        took[index] = time.perf_counter() - start
    return settings[min(took, key=lambda index: took[index])]
