"""What a failed call leaves: a state that was refused changes nothing, and an exception of a handler is what it was."""

from __future__ import annotations

import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deepnvme import optim

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


def made(count: int, **options: Any) -> optim.AdamW:
    return optim.AdamW([torch.nn.Parameter(torch.ones(5)) for _ in range(count)], **options)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path, is_on_disk: bool) -> None:
    options: dict[str, Any] = {"swap_dir": tmp_path, "memory": "8MB"} if is_on_disk else {}
    optimizer = made(1, **options)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(5)
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(made(2).state_dict())
    with pytest.raises(KeyError):
        optimizer.load_state_dict({"state": {}})
    after = optimizer.state_dict()
    assert after["state"].keys() == before["state"].keys()
    for name, value in before["state"][0].items():
        assert torch.equal(after["state"][0][name], value), name
    optimizer.step()
    optimizer.load_state_dict(before)
    optimizer.close()


@pytest.mark.parametrize("kind", [TimeoutError, InterruptedError, LookupError])
def test_an_error_of_a_handler_comes_out_of_step(kind: type[Exception]) -> None:
    optimizer = optim.AdamW([torch.nn.Parameter(torch.randn(64)) for _ in range(30)])
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)

    def handler(*_: object) -> None:
        raise kind("alarm")

    chooser, seen = random.Random(5), Counter[str]()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(400):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + chooser.random() * 2e-3)
                    for _ in range(20):
                        optimizer.step()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Exception as error:
                seen[type(error).__name__] += 1
            torch.set_grad_enabled(True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen.keys() == {kind.__name__}


def test_threads_that_cannot_be_started(python_fork: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    text = python_fork("""
        import resource, torch, deepnvme.optim
        param = torch.nn.Parameter(torch.ones(1000))
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (64 << 20),) * 2)
        try:
            deepnvme.optim.AdamW([param], threads=200)
        except deepnvme.Error as error:
            print(error)
    """).stdout
    assert "start 200 threads of a step" in text
    assert "pass fewer" in text
