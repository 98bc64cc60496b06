"""What a tool for steps is, and deepnvme's: AdamW with its state on disk, parameters and gradients in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from common.not_offered import NotOffered
from trainbench.tensors import LR, WEIGHT_DECAY, gradients, shapes, weights


@dataclass(frozen=True)
class Setting:
    """The setting of a tool."""

    folder: str
    elements: int
    memory: int
    """Bytes of state that may be in memory."""
    is_16_bit: bool = False
    """Parameters are of bf16, and their fp32 master weights are state, too."""
    options: dict[str, int] = field(default_factory=dict)
    """The options that trials have found."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return torch.bfloat16 if self.is_16_bit else torch.float32

    @property
    def state_bytes(self) -> int:
        """Bytes of two moments, and of master weights where there are any."""
        return self.elements * (12 if self.is_16_bit else 8)


class Stepper:
    """One way to have state on disk. It has tensors of its own, with the same numbers as all others."""

    name = ""
    #: Printed after the name: the state on disk, its transfer, and the end of the timing.
    contract = ""
    #: Reads through the page cache. Its file is dropped from it before each step.
    is_cached = False
    #: Settings that are tried before the rounds; the quickest is taken.
    trials: tuple[dict[str, int], ...] = ()

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def open(self) -> None:
        """Make tensors, and put the state on disk.

        Raises:
            NotOffered: it cannot take part, and why.
        """
        raise NotOffered("nobody steps here")

    def step(self, rate: float) -> None:
        """Make a step with that learning rate."""

    def settle(self) -> None:
        """Return when the state of all steps is where the contract says."""

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters, flat, in order."""
        return []

    def gradients(self) -> list[torch.Tensor]:
        """Return all gradients, flat, in order."""
        return []

    def rest(self) -> None:
        """Do the work between steps that must not count."""

    def close(self) -> None:
        """Remove the state on disk."""

    def settings(self) -> dict[str, Any]:
        """Return the chosen settings, for the record."""
        return {**self.setting.options, "contract": self.contract}

    def counted(self) -> dict[str, float]:
        """Return the tool's own counts since it was opened."""
        return {}


class Plain(Stepper):
    """Parameters and gradients as a model has them, each by itself."""

    def open(self) -> None:
        """Make parameters with gradients."""
        self.of = list(_trained(self.setting))

    def parameters(self) -> list[torch.Tensor]:
        """See the base."""
        return [one.detach().view(-1) for one in self.of]

    def gradients(self) -> list[torch.Tensor]:
        """See the base."""
        return [one.grad.view(-1) for one in self.of if one.grad is not None]


def _trained(setting: Setting) -> Iterator[torch.nn.Parameter]:
    values, slopes = weights(), gradients()
    for shape in shapes(setting.elements):
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=setting.dtype))
        values.fill(parameter.detach().view(-1))
        parameter.grad = torch.empty(shape, dtype=setting.dtype)
        slopes.fill(parameter.grad.view(-1))
        yield parameter


class Deepnvme(Plain):
    """``deepnvme.optim.AdamW`` with ``swap_dir`` and ``memory``."""

    name = "deepnvme"
    contract = "moments (and master weights) on disk, direct; the clock stops when all of it is written"
    is_fused = False

    def open(self) -> None:
        """See the base."""
        import deepnvme.optim  # noqa: PLC0415

        super().open()
        self._optimizer = deepnvme.optim.AdamW(
            self.of,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            swap_dir=self.setting.folder,
            memory=self.setting.memory,
            fused=self.is_fused or None,
        )

    def step(self, rate: float) -> None:
        """See the base."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def settle(self) -> None:
        """Write the changes that a step leaves to be written during the next one."""
        self._optimizer._store.swapper.flush()  # noqa: SLF001

    def close(self) -> None:
        """See the base."""
        self._optimizer.close()

    def counted(self) -> dict[str, float]:
        """See the base."""
        stats = self._optimizer.swap_stats()
        names = ("bytes_read", "bytes_written", "stalled_s", "hits", "waits", "resident_bytes_peak")
        return {name: float(getattr(stats, name)) for name in names}

    def settings(self) -> dict[str, Any]:
        """See the base."""
        return {**super().settings(), "memory_bytes": self.setting.memory, "fused": self.is_fused}


class Fused(Deepnvme):
    """The same with exact square roots, as DeepSpeed has them."""

    name = "deepnvme, fused"
    is_fused = True
