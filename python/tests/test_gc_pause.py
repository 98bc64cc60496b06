"""The collector runs again after a pause, whatever ends it."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from deepnvme._utils.gc_pause import GcPause, gc_paused
from forked_child import status_of_child
from pause import Pause

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@gc_paused
def work(*, fails: bool = False) -> None:
    assert not gc.isenabled()
    with GcPause():
        assert not gc.isenabled()
    assert not gc.isenabled()
    if fails:
        raise LookupError


def test_after_the_end_and_after_an_error() -> None:
    work()
    assert gc.isenabled()
    with pytest.raises(LookupError):
        work(fails=True)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    work()
    assert not gc.isenabled()


def test_an_interrupt_at_any_point(interrupted: Any) -> None:
    with interrupted() as points:
        work()
    for point in range(1, points.count + 1):
        with suppress(KeyboardInterrupt), interrupted(point):
            work()
        assert gc.isenabled(), f"interrupted at point {point} of {points.count}"


def test_a_child_forked_in_the_pause_of_another_thread() -> None:
    pause = Pause()
    with pause.of(gc_paused(pause.wait)):
        assert not gc.isenabled()
        assert status_of_child(lambda: 0 if gc.isenabled() else 1) == 0
    assert gc.isenabled()
