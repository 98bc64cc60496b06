"""Tests of the kernel: threads, stochastic rounding, 8-bit state, sums, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme._deepnvme import Kernel
from forked_child import status_of_child

InThreads = Callable[[Callable[[int], object], int], None]

_BLOCK = 128


def _zeros(kind: str, elements: int) -> Any:
    if kind == "q8":
        return torch.zeros(elements, dtype=torch.uint8), torch.zeros(-(-elements // _BLOCK))
    return torch.zeros(elements, dtype=torch.float32 if kind == "f32" else torch.bfloat16)


def _flat(moment: Any) -> list[torch.Tensor]:
    return list(moment) if isinstance(moment, tuple) else [moment]


def _train(kernel: Kernel, kind: str, elements: int, steps: int = 3, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(elements, generator=generator)
    out = torch.zeros(elements, dtype=torch.bfloat16)
    moments = [_zeros(kind, elements) for _ in range(2)]
    for step in range(1, steps + 1):
        grad = torch.randn(elements, generator=generator)
        kernel.step("adamw", {}, [(weights, grad, moments, out, 0)], step=step, **options)
    return [weights, out, *(tensor for moment in moments for tensor in _flat(moment))]


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8"])
def test_threads_change_nothing(kind: str) -> None:
    expected = _train(Kernel(threads=1), kind, 200_001, stochastic=True, seed=3)
    for threads in (2, 3, 8):
        got = _train(Kernel(threads=threads), kind, 200_001, stochastic=True, seed=3)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8"])
def test_a_tensor_in_pieces_is_the_tensor(kernel: Kernel, kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    weights, grad = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    whole, pieces = (weights.clone(), weights.clone())
    moments = [[_zeros(kind, 1000) for _ in range(2)] for _ in range(2)]
    kernel.step("adamw", {}, [(whole, grad, moments[0], None, 50)], step=1, seed=1)

    def piece(moment: Any, begin: int, end: int) -> Any:
        if isinstance(moment, tuple):
            return moment[0][begin:end], moment[1][begin // _BLOCK : -(-end // _BLOCK)]
        return moment[begin:end]

    for begin, end in [(256, 1000), (0, 256)]:
        part = [piece(moment, begin, end) for moment in moments[1]]
        kernel.step("adamw", {}, [(pieces[begin:end], grad[begin:end], part, None, 50 + begin)], step=1, seed=1)
    assert torch.equal(whole, pieces)
    for one, other in zip(*moments, strict=True):
        assert all(map(torch.equal, _flat(one), _flat(other)))


def test_rounding_at_random_has_the_right_mean(kernel: Kernel) -> None:
    # A quarter of the way from one bf16 number to the next.
    master = torch.full((100_000,), 1 + 2.0**-9)
    out = torch.zeros(100_000, dtype=torch.bfloat16)
    nothing = torch.zeros(100_000)
    shares = []
    for seed in range(3):
        kernel.step("sgd", {"lr": 1.0}, [(master, nothing, [], out, 0)], step=1, stochastic=True, seed=seed)
        assert set(out.tolist()) == {1.0, 1 + 2.0**-7}
        shares.append((out > 1).float().mean().item())
    assert len(set(shares)) == 3, "a seed of its own makes noise of its own"
    # The seeds are fixed, so this cannot fail by chance; six standard errors.
    assert shares == pytest.approx([0.25] * 3, abs=0.009)
    kernel.step("sgd", {"lr": 1.0}, [(master, nothing, [], out, 0)], step=1)
    assert set(out.tolist()) == {1.0}


@pytest.mark.parametrize("summed", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_torchs(kernel: Kernel, summed: torch.dtype, new: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    total = (torch.randn(1003, generator=generator) * 100).to(summed)
    grad = (torch.randn(1003, generator=generator) * 100).to(new)
    expected = (total.float() + grad.float()).to(summed)
    kernel.accumulate(total, grad)
    assert torch.equal(total, expected)


def test_gradients_that_are_not_finite_are_found(kernel: Kernel) -> None:
    good = torch.full((70_001,), 3.0)
    assert kernel.measure([good, good.half()]) == (9.0 * 140_002, True)
    for odd in (float("inf"), float("-inf"), float("nan")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            bad = good.to(dtype)
            bad[-1] = odd
            assert not kernel.measure([good, bad])[1]
    assert kernel.measure([]) == (0.0, True)


def test_a_forked_child_steps_too(kernel: Kernel) -> None:
    expected = _train(kernel, "q8", 200_001)

    def work() -> None:
        # The OpenMP threads belong to the parent.
        torch.set_num_threads(1)
        assert all(map(torch.equal, _train(kernel, "q8", 200_001), expected))

    assert status_of_child(work) == 0


def test_several_threads_of_python_at_once(kernel: Kernel, in_threads: InThreads) -> None:
    expected = _train(kernel, "f32", 100_001)
    answers: list[bool] = []

    def work(_: int) -> None:
        answers.append(all(map(torch.equal, _train(kernel, "f32", 100_001), expected)))

    in_threads(work, 4)
    assert answers == [True] * 4


def test_a_kernel_has_the_threads_that_it_was_given() -> None:
    def ours() -> int:
        names = [_name(task) for task in Path("/proc/self/task").iterdir()]
        return sum(name.startswith("deepnvme-optim") for name in names)

    before = ours()
    kernel = Kernel(threads=3)
    _train(kernel, "f32", 300_001)
    assert kernel.threads == 3
    assert ours() <= before + 3
    assert Kernel(threads=1).threads == 1


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text(encoding="utf-8")
    except OSError:
        return ""


def test_refused_arguments(kernel: Kernel) -> None:
    weights, grad, moments = torch.zeros(10), torch.zeros(10), [torch.zeros(10), torch.zeros(10)]

    def step(algorithm: str = "adamw", settings: Any = None, part: Any = (), **options: Any) -> None:
        parts = [part or (weights, grad, moments, None, 0)]
        kernel.step(algorithm, settings or {}, parts, **{"step": 1, **options})

    with pytest.raises(ValueError, match="'adam', 'adamw', 'lion', 'sgd' or 'adagrad'"):
        step("adamax")
    with pytest.raises(ValueError, match="no setting 'momentum'; use lr, beta1"):
        step(settings={"momentum": 0.9})
    with pytest.raises(TypeError, match="lr: "):
        step(settings={"lr": "fast"})
    with pytest.raises(ValueError, match="beta1 is 1"):
        step(settings={"beta1": 1.0})
    with pytest.raises(ValueError, match="the first one is 1"):
        step(step=0)
    with pytest.raises(ValueError, match="has 1 moments; the algorithm has 2"):
        step(part=(weights, grad, moments[:1], None, 0))
    with pytest.raises(ValueError, match="grad has 9 elements; the weights have 10"):
        step(part=(weights, grad[:9], moments, None, 0))
    with pytest.raises(ValueError, match="share memory"):
        step(part=(weights, weights, moments, None, 0))
    with pytest.raises(ValueError, match="share memory"):
        step(part=(weights, grad, [moments[0], moments[0]], None, 0))
    with pytest.raises(ValueError, match="not contiguous"):
        step(part=(weights, torch.zeros(20)[::2], moments, None, 0))
    with pytest.raises(TypeError, match=r"torch\.float64"):
        step(part=(weights, grad.double(), moments, None, 0))
    with pytest.raises(TypeError, match="not one block of memory"):
        step(part=(weights, grad.to_sparse(), moments, None, 0))
    with pytest.raises(TypeError, match="codes, scales"):
        step(part=(weights, grad, [moments[0], (moments[1], moments[1])], None, 0))
    with pytest.raises(ValueError, match="1 scales; 300 elements need 3"):
        odd = torch.zeros(300, dtype=torch.uint8), torch.zeros(1)
        step(part=(torch.zeros(300), torch.zeros(300), [torch.zeros(300), odd], None, 0))
    with pytest.raises(ValueError, match="'exact', 'two-step'"):
        Kernel(sqrt_mode="wrong")
    with pytest.raises(ValueError, match="at most 256"):
        Kernel(threads=1000)
    assert not weights.any()
