"""The row `optimizer`: AdamW steps with parameters and gradients on the GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import deepnvme
import torch

from common.measure import Sample, timed
from common.not_offered import NotOffered
from gpubench.data import Mismatch, size_text
from gpubench.rows import RoundLimits, RowResult, construct, run_rounds
from gpubench.tool import Group, Setup, ToolBase

OURS = "deepnvme.optim, state on disk, through the host"
CEILING = "torch fused, all on the GPU"

_TENSORS = 16
#: Bytes of state for each element: two fp32 moments.
_STATE_BYTES = 8
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
#: torch's plain loop steps one element of this many as well, for comparison.
_COMPARED_STRIDE = 477
#: The memory of state on disk is the state's size divided by this.
_MEMORY_DIVISOR = 3
_CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
# Equal up to the last bits: builds of torch with MKL take square roots with it, which may round otherwise.
_SAME: dict[str, Any] = {"rtol": 2**-21, "atol": 1e-8}


class Stepper(ToolBase, ABC):
    """One way to step parameters on the GPU. It steps its own copies of them."""

    #: It rounds as torch's plain loop does on the host.
    is_exact = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.parameters: list[torch.Tensor] = []
        self.steps = 0
        self._optimizer: Any = None

    def open(self, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Make the optimizer; not timed. The gradients, on the GPU, are the same in each step."""
        self.parameters = [value.clone().requires_grad_() for value in values]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer = self._make(self.parameters)

    def step(self) -> None:
        """Step once."""
        self._optimizer.step()

    def close(self) -> None:
        """See the base."""
        if hasattr(self._optimizer, "close"):
            self._optimizer.close()
        self._optimizer = None
        self.parameters = []

    @abstractmethod
    def _make(self, parameters: list[torch.Tensor]) -> Any:
        """Return the optimizer of these parameters."""


class Fused(Stepper):
    """``torch.optim.AdamW(fused=True)`` of parameters on the GPU."""

    name = CEILING
    group: Group = "ceiling"

    def _make(self, parameters: list[torch.Tensor]) -> Any:
        return torch.optim.AdamW(parameters, fused=True, **_SETTINGS)


class OnGpu(Stepper):
    """``deepnvme.optim.AdamW`` of parameters on the GPU. If it refuses them, it is left out with its reason."""

    name = "deepnvme.optim, parameters on the GPU"
    group: Group = "deepnvme"
    is_exact = True

    def step(self) -> None:
        """See the base."""
        try:
            super().step()
        except (TypeError, ValueError) as error:
            raise NotOffered(f"refused: {error}") from error

    def _make(self, parameters: list[torch.Tensor]) -> Any:
        return deepnvme.optim.AdamW(parameters, **_SETTINGS)


class ThroughHost(Stepper):
    """Parameters and state on the host: gradients are copied there, and new parameters back."""

    def open(self, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """See the base."""
        gpu = self.setup.gpu
        self.parameters = [value.clone() for value in values]
        self._gradients = gradients
        self._host: list[torch.Tensor] = []
        self._host_gradients: list[torch.Tensor] = []
        for value in values:
            held, gradient = (gpu.pinned(value.nbytes).view(torch.float32).view(value.shape) for _ in range(2))
            gpu.copy(held, value)
            parameter = held.requires_grad_()
            parameter.grad = gradient
            self._host.append(parameter)
            self._host_gradients.append(gradient)
        self._optimizer = self._make(self._host)

    def step(self) -> None:
        """See the base."""
        copy = self.setup.gpu.copy
        with torch.no_grad():
            for held, gradient in zip(self._host_gradients, self._gradients, strict=True):
                copy(held, gradient)
            self._optimizer.step()
            for mine, parameter in zip(self.parameters, self._host, strict=True):
                copy(mine, parameter)

    def close(self) -> None:
        """See the base."""
        super().close()
        self._host, self._host_gradients, self._gradients = [], [], []


class OnDisk(ThroughHost):
    """``deepnvme.optim.AdamW`` with a third of its state in memory."""

    name = OURS
    group: Group = "deepnvme"
    is_exact = True

    def settings(self) -> str:
        """See the base."""
        return f"memory=1/{_MEMORY_DIVISOR} of the state"

    def _make(self, parameters: list[torch.Tensor]) -> Any:
        memory = sum(each.numel() for each in parameters) * _STATE_BYTES // _MEMORY_DIVISOR
        return deepnvme.optim.AdamW(parameters, swap_dir=self.setup.scratch, memory=memory, **_SETTINGS)


class StateInMemory(ThroughHost):
    """``deepnvme.optim.AdamW`` with all of its state in memory."""

    name = "deepnvme.optim, state in memory, through the host"
    group: Group = "deepnvme"
    is_exact = True

    def _make(self, parameters: list[torch.Tensor]) -> Any:
        return deepnvme.optim.AdamW(parameters, **_SETTINGS)


class TorchOnHost(ThroughHost):
    """``torch.optim.AdamW(fused=True)`` with all of its state in memory."""

    name = "torch fused, state in memory, through the host"

    def _make(self, parameters: list[torch.Tensor]) -> Any:
        return torch.optim.AdamW(parameters, fused=True, **_SETTINGS)


KINDS: tuple[type[Stepper], ...] = (OnDisk, StateInMemory, TorchOnHost, OnGpu, Fused)


class _Expected:
    """torch's plain loop over some of the elements."""

    def __init__(self, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        self._parameter = self.part(values).requires_grad_()
        self._parameter.grad = self.part(gradients)
        self._optimizer = torch.optim.AdamW([self._parameter], foreach=False, fused=False, **_SETTINGS)
        self._after = [self._parameter.detach().clone()]

    @staticmethod
    def part(tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the compared elements, on the host."""
        return torch.cat([each.detach().view(-1)[::_COMPARED_STRIDE].cpu() for each in tensors])

    def after(self, steps: int) -> torch.Tensor:
        """Return the elements after this number of steps."""
        while len(self._after) <= steps:
            self._optimizer.step()
            self._after.append(self._parameter.detach().clone())
        return self._after[steps]


def optimizer(setup: Setup, row: RowResult, limits: RoundLimits) -> RowResult:
    """Step fp32 parameters on the GPU. Each has a gradient there, and two moments."""
    elements = max(_TENSORS * 1024, setup.nbytes // _STATE_BYTES)
    row.title = (
        f"AdamW step of {elements / 1e6:.1f} million fp32 parameters on the GPU; bytes are the state, "
        f"{size_text(setup.nbytes)}"
    )
    row.ours, row.reference = OURS, CEILING
    row.counterparts = {TorchOnHost.name: StateInMemory.name}
    row.note(setup.gpu.compute_note)
    tools = construct(row, KINDS, setup, limits)
    torch.manual_seed(7)
    shape = (_TENSORS, elements // _TENSORS)
    values = list(torch.randn(shape, device=setup.gpu.compute))
    gradients = list(torch.randn(shape, device=setup.gpu.compute).mul_(0.01))
    expected = _Expected(values, gradients)
    nbytes = sum(value.numel() for value in values) * _STATE_BYTES

    def once(one: Stepper, is_first: bool) -> Sample:  # noqa: FBT001 - the first round, or a later one
        if is_first:
            one.open(values, gradients)

        def action() -> None:
            one.step()
            setup.gpu.wait()

        sample, _ = timed(action, nbytes)
        one.steps += 1
        _compare(one, expected.after(one.steps))
        return replace(sample, extra={"step_s": sample.wall_s})

    return run_rounds(row, tools, limits, once)


def _compare(one: Stepper, wanted: torch.Tensor) -> None:
    got = _Expected.part(one.parameters)
    if not torch.allclose(got, wanted, **(_SAME if one.is_exact else _CLOSE)):
        worst = float((got - wanted).abs().max())
        raise Mismatch(f"{one.name} differs from torch by up to {worst:.3g} after {one.steps} steps")
