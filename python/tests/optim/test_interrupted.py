"""A step interrupted by Ctrl-C and repeated equals an uninterrupted step bit for bit."""

from __future__ import annotations

import copy
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from deepnvme import optim
from deepnvme.errors import ClosedError
from deepnvme.optim._running_step import StepProgress
from deepnvme.optim._swap_store import SwapStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# If a generator is discarded, Python swallows the interrupt and reports it. Nothing was interrupted then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Number of points to try for each kind of optimizer; the choice differs between kinds.
POINTS = 25

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in memory": (optim.AdamW, {"lr": 1e-2}),
    "in memory, 8 bits": (optim.AdamW, {"lr": 1e-2, "moments": "8bit", "max_norm": 0.1}),
    "on disk": (optim.AdamW, {"lr": 1e-2, "swap": True, "max_norm": 0.1}),
    "on disk, rounded at random": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "swap": True, "stochastic_rounding": True}),
    "gradients on disk": (optim.AdamW, {"lr": 1e-2, "swap": True, "swap_gradients": True}),
    "gradients on disk, 8 bits": (
        optim.Adagrad,
        {"lr": 1e-2, "swap": True, "swap_gradients": True, "moments": "bf16", "initial_accumulator_value": 0.1},
    ),
}


def net_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 60), nn.Tanh(), nn.Linear(60, 7)).to(dtype)


def made(kind: str, net: nn.Module, folder: Path) -> Any:
    make, settings = KINDS[kind]
    settings = dict(settings)
    if settings.pop("swap", False):
        # A few groups, so that a step has several batches.
        settings |= {"swap_dir": folder, "memory": 128 << 10}
    return make(net.parameters(), **settings)


def backward(net: nn.Module, step: int) -> None:
    net.zero_grad()
    dtype = next(net.parameters()).dtype
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step)).to(dtype)
    net(x).float().square().mean().backward()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(mine, his) for mine, his in zip(one.parameters(), other.parameters(), strict=True))


def expected(kind: str, dtype: torch.dtype, folder: Path) -> Iterator[nn.Module]:
    """Yield the net after each of three steps."""
    net = net_of(dtype)
    optimizer = made(kind, net, folder)
    for step in range(3):
        backward(net, step)
        optimizer.step()
        yield copy.deepcopy(net)
    optimizer.close()


def interrupt(
    interrupted: Any, kind: str, dtype: torch.dtype, folder: Path, *, which: int, point: int
) -> tuple[int, list[nn.Module]]:
    """Interrupt one of three steps, and repeat it. Return the number of points, and the net after each step."""
    net = net_of(dtype)
    optimizer = made(kind, net, folder)
    seen, count = [], 0
    for step in range(3):
        backward(net, step)
        if step == which:
            before = copy.deepcopy(net)
            try:
                with interrupted(point) as points:
                    optimizer.step()
            except KeyboardInterrupt:
                # Even while the traceback refers to everything in progress. The last points are behind the step's end.
                if optimizer.has_unfinished_step or same(net, before):
                    optimizer.step()
            count = points.count
        else:
            optimizer.step()
        seen.append(copy.deepcopy(net))
    assert not optimizer.has_unfinished_step
    optimizer._check_complete()
    optimizer.close()
    return count, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_was_interrupted_anywhere_is_done_once(
    tmp_path: Path, interrupted: Any, kind: str, dtype: torch.dtype
) -> None:
    wanted = list(expected(kind, dtype, tmp_path))
    for which in (0, 1):
        count, seen = interrupt(interrupted, kind, dtype, tmp_path, which=which, point=0)
        assert all(map(same, seen, wanted))
        assert count > 20
        stride = max(count // POINTS, 1)
        for point in range(1 + (count + which) % stride, count + 1, stride):
            _, seen = interrupt(interrupted, kind, dtype, tmp_path, which=which, point=point)
            for step, (mine, his) in enumerate(zip(seen, wanted, strict=True)):
                assert same(mine, his), f"after step {step}, interrupted at point {point} of {count} of step {which}"


def test_ctrl_c_at_any_moment(tmp_path: Path, python_fork: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Send a real signal 50 times, each at another moment of a step."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import random, signal, sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        import test_interrupted as base
        import pathlib

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
        kind = "gradients on disk" if seed % 2 else "on disk"
        wanted = list(base.expected(kind, torch.float32, folder))
        net = base.net_of(torch.float32)
        optimizer = base.made(kind, net, folder)
        random.seed(seed)
        interrupts = 0
        for step in range(3):
            base.backward(net, step)
            began = time.perf_counter()
            try:
                if step == 1:
                    # As long as the first step has taken, at most.
                    signal.setitimer(signal.ITIMER_REAL, max(random.random() * took, 1e-6))
                optimizer.step()
            except KeyboardInterrupt:
                interrupts += 1
                # Behind the end of the step, torch's own code runs still.
                counted = int(optimizer.state[net[0].weight]["step"])
                if optimizer.has_unfinished_step or counted == step:
                    optimizer.step()
            finally:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
            took = time.perf_counter() - began
            assert base.same(net, wanted[step]), (step, interrupts)
        print(interrupts)
        """)
    )
    interrupts = 0
    children = 2
    for child in range(children):
        code = "\n".join(
            [
                "import runpy, sys",
                f"for seed in range({child * 25}, {child * 25 + 25}):",
                f"    sys.argv = ['script', {str(tmp_path)!r}, str(seed)]",
                f"    runpy.run_path({str(script)!r}, run_name='__main__')",
            ]
        )
        interrupts += sum(map(int, python_fork(code).stdout.split()))
    assert interrupts > children, "hardly any signal has come within a step"


@pytest.mark.parametrize("form", ["load_state", "load_state_dict"])
def test_an_interrupted_load_must_be_repeated(tmp_path: Path, interrupted: Any, form: str) -> None:
    kind, dtype = "on disk", torch.bfloat16
    net = net_of(dtype)
    optimizer = made(kind, net, tmp_path)
    for step in range(2):
        backward(net, step)
        optimizer.step()
    optimizer.save_state(tmp_path / "state")
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    backward(net, 2)
    optimizer.step()
    wanted = copy.deepcopy(net)
    optimizer.close()

    def load(into: Any) -> None:
        into.load_state(tmp_path / "state") if form == "load_state" else into.load_state_dict(copy.deepcopy(saved))

    def fresh() -> tuple[nn.Module, Any]:
        other = net_of(dtype)
        other.load_state_dict(weights)
        return other, made(kind, other, tmp_path)

    other, his = fresh()
    with interrupted() as points:
        load(his)
    his.close()
    refused = 0
    for point in range(1, points.count + 1, max(points.count // 40, 1)):
        other, his = fresh()
        try:
            with interrupted(point):
                load(his)
        except KeyboardInterrupt:
            backward(other, 2)
            try:
                his._check_complete()
            except RuntimeError as error:
                assert "load it again" in str(error)
                refused += 1
                before = [param.clone() for param in other.parameters()]
                with pytest.raises(RuntimeError, match="load it again"):
                    his.step()
                assert all(map(torch.equal, before, other.parameters()))
            load(his)
        backward(other, 2)
        his.step()
        assert same(other, wanted), f"interrupted at point {point} of {points.count}"
        his.close()
    assert refused > 5


def test_a_save_that_was_interrupted_leaves_the_old_file(tmp_path: Path, interrupted: Any) -> None:
    net = net_of(torch.float32)
    optimizer = made("on disk", net, tmp_path)
    backward(net, 0)
    optimizer.step()
    path = tmp_path / "state"
    optimizer.save_state(path)
    old = path.read_bytes()
    backward(net, 1)
    optimizer.step()
    with interrupted() as points:
        optimizer.save_state(tmp_path / "other")
    new = (tmp_path / "other").read_bytes()
    for point in range(1, points.count + 1, max(points.count // 40, 1)):
        path.write_bytes(old)
        try:
            with interrupted(point):
                optimizer.save_state(path)
        except KeyboardInterrupt:
            assert path.read_bytes() in (old, new)
        optimizer.save_state(path)
        assert path.read_bytes() == new
    optimizer.close()


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("swaps", [False, True])
def test_a_closed_optimizer_says_so(tmp_path: Path, *, is_stopped: bool, swaps: bool) -> None:
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = optim.AdamW([param], swap_dir=tmp_path, memory="1MiB", swap_gradients=swaps)
    param.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.save_state(tmp_path / "state.safetensors")
    if is_stopped:
        optimizer._progress = StepProgress(1.0, counts_in_group=False)
    optimizer.close()
    before = [dict(group) for group in optimizer.param_groups]
    for grad in (torch.ones(100), None):
        param.grad = grad
        for call in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(state),
            lambda: optimizer.save_state(tmp_path / "other.safetensors"),
            lambda: optimizer.load_state(tmp_path / "state.safetensors"),
            # The refused calls before have not made it another error.
            optimizer.state_dict,
            optimizer.step,
        ):
            with pytest.raises(ClosedError, match="closed"):
                call()
    assert optimizer.param_groups == before
    assert not (tmp_path / "other.safetensors").exists()


def test_a_step_between_two_batches_is_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.randn(3_000_000))
    other = torch.nn.Parameter(param.detach().clone())
    optimizer = optim.AdamW([param], swap_dir=tmp_path, memory="8MB")
    reference = torch.optim.AdamW([other], foreach=False, fused=False)
    lease, left = SwapStore.lease_memory, 2

    def lease_memory(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return lease(*arguments)

    monkeypatch.setattr(SwapStore, "lease_memory", lease_memory)
    param.grad, other.grad = torch.randn_like(param), None
    other.grad = param.grad.clone()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    answers = [optimizer.has_unfinished_step]
    assert optimizer.state[param]["step"] == 1, "a step counts from its first change on"
    optimizer.step()
    reference.step()
    answers.append(optimizer.has_unfinished_step)
    assert answers == [True, False]
    assert torch.equal(param, other)
    optimizer.close()
