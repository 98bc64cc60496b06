"""Ctrl-C ends a loop over lazy tensors: no code of ours runs where Python drops the exceptions of signal handlers."""

from __future__ import annotations

import gc
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from deepnvme._utils.end_watch import EndWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class InterruptError(Exception):
    """What the handler of the test raises."""


def interruptions(run: Callable[[], object], tries: int, seconds: float) -> tuple[int, int, list[Any]]:
    """Interrupt calls at random moments. Return how often a handler raised, how often a call did, and what was lost."""
    raised = seen = 0
    lost: list[Any] = []

    def interrupt(*_: object) -> None:
        nonlocal raised
        raised += 1
        raise InterruptError

    # Objects of other tests would end meanwhile, among them those of Python's own weak sets.
    gc.collect()
    gc.disable()
    rng, hook = random.Random(3), sys.unraisablehook
    before = signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = lambda found: lost.append(found.object)
    try:
        for _ in range(tries):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, seconds))
                    run()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptError:  # noqa: PERF203 - each try is to be interrupted
                seen += 1
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
        gc.enable()
    return raised, seen, lost


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_lazy_tensors(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"state.{kind}"
    deepnvme.save({f"w{index}": torch.randn(64) for index in range(2000)}, path, progress=False)

    def run() -> None:
        for tensor in deepnvme.load(path, lazy=True, progress=False).values():
            tensor.sum()

    run()
    raised, seen, lost = interruptions(run, 60, 0.2)
    assert raised > 5
    assert lost == []
    assert raised == seen


@pytest.mark.parametrize("all_parts", [False, True])
def test_activations(tmp_path: Path, *, all_parts: bool) -> None:
    model: Any = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])
    batch = torch.randn(200, 128)
    if all_parts:
        model, closes = deepnvme.offload(model, torch.optim.SGD, lr=0.0, memory="512KiB", swap_dir=tmp_path)
    else:
        closes = deepnvme.offload_activations(tmp_path, memory="300KB", bytes_min="4KiB")
        closes.wrap(model)

    def run() -> None:
        for _ in range(4):
            model.zero_grad()
            model(batch).square().mean().backward()

    run()
    raised, seen, lost = interruptions(run, 400, 0.004)
    closes.close()
    # Hooks that stay would be called for every later operation of this thread.
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert raised > 50
    assert lost == []
    assert raised == seen


def test_ends_are_noted_once() -> None:
    class Thing:
        pass

    watch: EndWatch[int] = EndWatch()
    things = [Thing() for _ in range(5)]
    for number, thing in enumerate(things):
        watch.watch(thing, number)
    assert list(watch.ended()) == []
    del things[1:3], thing
    assert sorted(watch.ended()) == [1, 2]
    assert list(watch.ended()) == []
    assert len(watch.living()) == 3
    things.clear()
    assert sorted(watch.ended()) == [0, 3, 4]
    assert watch.living() == []
