"""Ctrl-C at any point of a ``with`` block leaves nothing borrowed, also while the traceback lives."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROUNDS = 1500


class HandledError(Exception):
    """What the handler raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float], object]]:
    def handle(*_: Any) -> None:
        raise HandledError

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def act(swapper: deepnvme.Swapper, call: str) -> None:
    match call:
        case "borrow":
            with swapper.borrow("key") as tensor:
                tensor.add_(1)
        case "shared":
            with swapper.borrow("key", shared=True) as tensor:
                tensor.sum()
        case "create":
            with swapper.create("key", (4,), torch.float32) as tensor:
                tensor.zero_()
        case "put":
            swapper.put("key", torch.ones(4))


@pytest.mark.parametrize("call", ["borrow", "shared", "create", "put"])
def test_nothing_is_borrowed_where_the_interrupt_is_handled(
    tmp_path: Path, call: str, alarm: Callable[[float], object]
) -> None:
    swapper = deepnvme.Swapper(tmp_path, memory="6MiB")

    interrupts = 0
    for _ in range(ROUNDS):
        if "key" not in swapper:
            swapper.put("key", torch.ones(4))
        try:
            alarm(random.uniform(1e-6, 6e-5))
            for _ in range(30):
                act(swapper, call)
            alarm(0)
        except HandledError:
            alarm(0)
            interrupts += 1
            # A borrow by this thread would be an error here, and any other thread would wait.
            if "key" in swapper:
                with swapper.borrow("key"):
                    pass
    assert interrupts > ROUNDS / 2
    swapper.close()
