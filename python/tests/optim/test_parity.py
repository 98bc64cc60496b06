"""Steps compared with torch's optimizers: the same bits after many steps, for any length."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from .conftest import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepnvme._deepnvme import Kernel

_STEPS = 200
_PLAIN: dict[str, Any] = {"foreach": False}
_FOR_LOOP: dict[str, Any] = {"foreach": False, "fused": False}


@dataclass(frozen=True)
class Case:
    """An algorithm with its settings, as torch and the kernel name them."""

    algorithm: str
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    settings: dict[str, Any]
    moments: tuple[str, ...] = ()
    begin: float = 0.0
    needs_root: bool = True
    name: str = ""


def _adam(algorithm: str, called: str, **settings: Any) -> Case:
    theirs = {name: value for name, value in settings.items() if not name.startswith("beta")}
    betas = (settings.get("beta1", 0.9), settings.get("beta2", 0.999))
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[algorithm]
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if settings.get("amsgrad") else 2]
    return Case(
        algorithm, lambda params: kind(params, betas=betas, **theirs, **_FOR_LOOP), settings, moments, name=called
    )


def _sgd(called: str, **settings: Any) -> Case:
    moments = ("momentum_buffer",) if settings.get("momentum") else ()
    make = lambda params: torch.optim.SGD(params, **settings, **_FOR_LOOP)  # noqa: E731
    return Case("sgd", make, settings, moments, needs_root=False, name=called)


def _adagrad(called: str, begin: float, **settings: Any) -> Case:
    make = lambda params: torch.optim.Adagrad(  # noqa: E731
        params, initial_accumulator_value=begin, **settings, **_PLAIN
    )
    return Case("adagrad", make, settings, ("sum",), begin, name=called)


_BOTH: dict[str, Any] = {"amsgrad": True, "maximize": True}
_CASES = [
    _adam("adamw", "adamw", lr=3e-3),
    _adam(
        "adamw", "adamw-all", lr=1e-2, beta1=0.4, beta2=0.95, eps=1e-4, weight_decay=0.3, amsgrad=True, maximize=True
    ),
    _adam("adam", "adam", lr=3e-3),
    _adam("adam", "adam-all", lr=1e-2, beta1=0.95, beta2=0.5, weight_decay=0.3, **_BOTH),
    _sgd("sgd", lr=3e-3),
    _sgd("sgd-momentum", lr=3e-3, momentum=0.9, dampening=0.3, weight_decay=0.01, maximize=True),
    _sgd("sgd-nesterov", lr=3e-3, momentum=0.8, nesterov=True, weight_decay=0.1),
    _adagrad("adagrad", 0.0, lr=1e-2),
    _adagrad("adagrad-all", 0.3, lr=1e-2, lr_decay=0.01, weight_decay=0.1, eps=1e-4, maximize=True),
]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_the_same_bits_as_torch(kernel: Kernel, case: Case) -> None:
    seed = random.randrange(1 << 30)
    lengths = random.Random(seed)
    sizes = [1, lengths.randrange(2, 130), lengths.randrange(130, 3000)]
    torch.manual_seed(seed)
    theirs = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = case.make(list(theirs))
    ours = [param.detach().clone() for param in theirs]
    moments = [[torch.full_like(param, case.begin) for _ in case.moments] for param in ours]
    for step in range(1, _STEPS + 1):
        grads = [torch.randn(size) * 10.0 ** lengths.uniform(-3, 2) for size in sizes]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        kernel.step(case.algorithm, case.settings, list(_parts(ours, grads, moments)), step=step)
    for param, mine, kept in zip(theirs, ours, moments, strict=True):
        assert_same_bits(mine, param.detach(), needs_root=case.needs_root)
        for name, moment in zip(case.moments, kept, strict=True):
            assert_same_bits(moment, optimizer.state[param][name], needs_root=case.needs_root)


def _parts(weights: list[torch.Tensor], grads: list[torch.Tensor], moments: list[list[torch.Tensor]]) -> Any:
    for weight, grad, kept in zip(weights, grads, moments, strict=True):
        yield weight, grad, kept, None, 0


_BETAS = (0.0, 1e-9, 0.3, 0.5, 0.7, 0.9, 0.999999, 1 - 1e-9)
_SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-20, -1e-20, 3e38, -3e38, math.inf, -math.inf, math.nan)
# A multiple of torch's vectors: it computes what is left over in another way, which gives zeros another sign where 1 -
# beta1 is 1.
_WHOLE = 1024


def _extreme() -> list[Case]:
    cases = []
    for beta in _BETAS:
        for algorithm in ("adam", "adamw"):
            cases += [
                _adam(algorithm, f"{algorithm} beta1={beta}", beta1=beta, beta2=0.9, weight_decay=0.1),
                _adam(algorithm, f"{algorithm} beta2={beta}", beta1=0.9, beta2=beta, amsgrad=True, weight_decay=0.0),
                _adam(
                    algorithm,
                    f"{algorithm} beta1=beta2={beta}",
                    beta1=beta,
                    beta2=beta,
                    maximize=True,
                    weight_decay=0.0,
                ),
            ]
        cases += [
            _sgd(f"sgd momentum={beta}", lr=0.1, momentum=beta),
            _sgd(f"sgd dampening={beta}", lr=0.1, momentum=0.5, dampening=beta, weight_decay=0.1, maximize=True),
        ]
        if beta:
            cases.append(_sgd(f"sgd nesterov={beta}", lr=0.1, momentum=beta, nesterov=True, maximize=True))
    return [*cases, _sgd("sgd dampening=1", lr=0.1, momentum=0.5, dampening=1.0), *_CASES]


def _some_special(generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(_WHOLE, generator=generator)
    which = torch.randint(0, 2 * len(_SPECIAL), (_WHOLE,), generator=generator)
    for index, special in enumerate(_SPECIAL):
        values[which == index] = special
    return values


@pytest.mark.parametrize("case", _extreme(), ids=lambda case: case.name)
def test_special_values_and_extreme_settings(kernel: Kernel, case: Case) -> None:
    seed = random.randrange(1 << 30)
    generator = torch.Generator().manual_seed(seed)
    theirs = torch.nn.Parameter(_some_special(generator))
    optimizer = case.make([theirs])
    ours = theirs.detach().clone()
    moments = [torch.full_like(ours, case.begin) for _ in case.moments]
    for step in range(1, 5):
        theirs.grad = _some_special(generator)
        kernel.step(case.algorithm, case.settings, list(_parts([ours], [theirs.grad], [moments])), step=step)
        optimizer.step()
        for name, moment in zip(case.moments, moments, strict=True):
            # `seed` is shown by the assertion of a failure.
            assert_same_bits(moment, optimizer.state[theirs][name], needs_root=case.needs_root)
        assert_same_bits(ours, theirs.detach(), needs_root=case.needs_root)


@pytest.mark.parametrize("beta", _BETAS)
def test_special_values_of_lion(kernel: Kernel, beta: float) -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    ours, mean = _some_special(generator), torch.zeros(_WHOLE)
    theirs, their_mean = ours.clone(), mean.clone()
    for step in range(1, 5):
        grad = _some_special(generator)
        kernel.step("lion", {"lr": 0.1, "beta1": beta, "beta2": beta}, [(ours, grad, [mean], None, 0)], step=step)
        theirs.add_(their_mean.lerp(grad, 1 - beta).sign(), alpha=-0.1)
        their_mean.lerp_(grad, 1 - beta)
        assert_same_bits(mean, their_mean, needs_root=False)
        assert_same_bits(ours, theirs, needs_root=False)


@pytest.mark.parametrize("size", [1, 7, 15, 17, 31, 47])
def test_only_the_sign_of_a_zero_depends_on_the_length(kernel: Kernel, size: int) -> None:
    theirs = torch.nn.Parameter(torch.ones(size))
    optimizer = torch.optim.AdamW([theirs], betas=(0.0, 0.9), **_FOR_LOOP)
    ours, moments = theirs.detach().clone(), [torch.zeros(size) for _ in range(2)]
    for step in range(1, 5):
        theirs.grad = torch.full((size,), -0.0)
        kernel.step("adamw", {"beta1": 0.0, "beta2": 0.9}, [(ours, theirs.grad, moments, None, 0)], step=step)
        optimizer.step()
        # As for every other length.
        assert bool(moments[0].signbit().all()) == (step == 1 or bool(step % 2))
    assert torch.equal(moments[0], optimizer.state[theirs]["exp_avg"])
    assert_same_bits(ours, theirs.detach(), needs_root=True)


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_its_three_lines_of_torch(kernel: Kernel, maximize: bool) -> None:
    torch.manual_seed(2)
    ours, mean = torch.randn(1001), torch.zeros(1001)
    theirs, their_mean = ours.clone(), mean.clone()
    lr, beta1, beta2, decay = 3e-3, 0.9, 0.99, 0.1
    settings = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": decay, "maximize": maximize}
    for step in range(1, _STEPS + 1):
        # A few zeros and NaNs: neither has a sign.
        grad = torch.randn(1001) * (torch.rand(1001) > 0.1)
        kernel.step("lion", settings, [(ours, grad, [mean], None, 0)], step=step)
        grad = -grad if maximize else grad
        theirs.mul_(1 - lr * decay)
        theirs.add_(their_mean.lerp(grad, 1 - beta1).sign(), alpha=-lr)
        their_mean.lerp_(grad, 1 - beta2)
    assert_same_bits(ours, theirs, needs_root=False)
    assert_same_bits(mean, their_mean, needs_root=False)


def test_a_tensor_that_torch_gives_to_several_threads(kernel: Kernel) -> None:
    torch.manual_seed(3)
    torch.set_num_threads(2)
    try:
        theirs = torch.nn.Parameter(torch.randn(300_007))
        optimizer = torch.optim.AdamW([theirs], **_FOR_LOOP)
        ours, moments = theirs.detach().clone(), [torch.zeros(300_007) for _ in range(2)]
        for step in range(1, 6):
            theirs.grad = torch.randn(300_007)
            kernel.step("adamw", {}, [(ours, theirs.grad, moments, None, 0)], step=step)
            optimizer.step()
    finally:
        torch.set_num_threads(1)
    assert_same_bits(ours, theirs.detach(), needs_root=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_parameters_are_rounded_master_weights(kernel: Kernel, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    master = torch.nn.Parameter(torch.randn(777))
    optimizer = torch.optim.AdamW([master], **_FOR_LOOP)
    ours, moments = master.detach().clone(), [torch.zeros(777) for _ in range(2)]
    param = torch.zeros(777, dtype=dtype)
    for step in range(1, _STEPS + 1):
        grad = (torch.randn(777) * 0.01).to(dtype)
        master.grad = grad.float()
        optimizer.step()
        kernel.step("adamw", {}, [(ours, grad, moments, param, 0)], step=step)
        assert torch.equal(param, ours.to(dtype))
    assert_same_bits(ours, master.detach(), needs_root=True)


def test_unscaling_and_clipping_are_torchs(kernel: Kernel) -> None:
    torch.manual_seed(5)
    scale, most = 1024.0, 0.5
    theirs = torch.nn.Parameter(torch.randn(1234))
    optimizer = torch.optim.AdamW([theirs], **_FOR_LOOP)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
    scaler.scale(torch.zeros(()))
    ours, moments = theirs.detach().clone(), [torch.zeros(1234) for _ in range(2)]
    for step in range(1, 51):
        grad = torch.randn(1234) * scale
        theirs.grad = grad.clone()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([theirs], most)
        scaler.step(optimizer)
        scaler.update()
        squares, is_finite = kernel.measure([grad], unscale=1 / scale)
        assert is_finite
        assert squares**0.5 == pytest.approx(norm.item(), rel=1e-5)
        # torch's own coefficient, so that the rest is compared bit for bit.
        clip = torch.clamp(most / (norm + 1e-6), max=1.0).item()
        kernel.step("adamw", {}, [(ours, grad, moments, None, 0)], step=step, unscale=1 / scale, clip=clip)
    assert_same_bits(ours, theirs.detach(), needs_root=True)


def test_against_the_build_of_torch_for_avx2() -> None:
    """Make CPUs with AVX-512 use it. It is the build they use for these operators anyway."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this CPU has no AVX-512, so that the other tests were against what it has")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "same_bits and adamw"]
    # The folder of the package under test.
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": paths}
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
