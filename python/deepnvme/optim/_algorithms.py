"""The optimizer classes: the algorithm, settings and moments of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepnvme._utils.public import public_in
from deepnvme.errors import InvalidArgumentError
from deepnvme.optim._optimizer import ParamGroup, scalars
from deepnvme.optim._state_dict import KernelOptimizer


def _adam(group: ParamGroup) -> dict[str, float]:
    settings = scalars(group, ("lr", "eps", "weight_decay"))
    settings["beta1"], settings["beta2"] = map(float, group["betas"])
    return {**settings, "amsgrad": bool(group["amsgrad"]), "maximize": bool(group["maximize"])}


def _refuse_differentiable(group: ParamGroup) -> None:
    if group.get("differentiable") or group.get("capturable"):
        msg = "deepnvme.optim steps can neither be differentiated nor captured; use torch.optim for that"
        raise InvalidArgumentError(msg)


@public_in("deepnvme.optim")
class Adam(KernelOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with a faster step, and optionally with state on disk.

    ``decoupled_weight_decay=True`` makes it AdamW, as in torch. The keyword arguments of ``deepnvme.optim``
    (``swap_dir``, ``memory``, ``moments``, ...) apply in addition.

    Args:
        *arguments: the parameters or param groups, and the settings in torch's order.
        **settings: torch's settings by name: ``lr`` (default 1e-3), ``betas`` (0.9, 0.999), ``eps`` (1e-8),
            ``weight_decay`` (0), ``amsgrad`` (False), ``maximize`` (False), ``fused`` (None; True:
            exact square roots).

    Raises:
        ValueError: a setting is out of range, or two of them contradict each other.
        TypeError: a setting is of the wrong type.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = deepnvme.optim.Adam(model.parameters(), lr=1e-3)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    def _algorithm(self, group: ParamGroup) -> tuple[str, dict[str, float]]:
        _refuse_differentiable(group)
        return "adamw" if group["decoupled_weight_decay"] else "adam", _adam(group)

    def _moments(self, group: ParamGroup) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]


@public_in("deepnvme.optim")
class AdamW(KernelOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` with a faster step, and optionally with state on disk.

    ``swap_dir="/mnt/nvme", memory="512MiB"`` keep the state on disk.

    Args:
        *arguments: the parameters or param groups, and the settings in torch's order.
        **settings: torch's settings by name: ``lr`` (default 1e-3), ``betas`` (0.9, 0.999), ``eps`` (1e-8),
            ``weight_decay`` (1e-2), ``amsgrad`` (False), ``maximize`` (False), ``fused`` (None; True:
            exact square roots).

    Raises:
        ValueError: a setting is out of range, or two of them contradict each other.
        TypeError: a setting is of the wrong type.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = deepnvme.optim.AdamW(model.parameters(), lr=3e-4, swap_dir=".", memory="1MB")
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    _algorithm = Adam._algorithm  # noqa: SLF001
    _moments = Adam._moments  # noqa: SLF001


@public_in("deepnvme.optim")
class SGD(KernelOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with a faster step, and with its momentum on disk if asked.

    ``swap_dir="/mnt/nvme", memory="512MiB"`` keep the state on disk.

    Args:
        *arguments: the parameters or param groups, and the settings in torch's order.
        **settings: torch's settings by name: ``lr`` (default 1e-3), ``momentum`` (0), ``dampening`` (0),
            ``weight_decay`` (0), ``nesterov`` (False), ``maximize`` (False), ``fused`` (None; True:
            exact square roots).

    Raises:
        ValueError: a setting is out of range, or two of them contradict each other.
        TypeError: a setting is of the wrong type.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = deepnvme.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    _counts_steps = False

    def _algorithm(self, group: ParamGroup) -> tuple[str, dict[str, float]]:
        _refuse_differentiable(group)
        settings = scalars(group, ("lr", "momentum", "dampening", "weight_decay"))
        return "sgd", {**settings, "nesterov": bool(group["nesterov"]), "maximize": bool(group["maximize"])}

    def _moments(self, group: ParamGroup) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _initialise_count(self, state: dict[str, Any]) -> None:
        """Do nothing: torch's SGD counts no steps, and has no state without momentum."""

    def _next_count(self, param: torch.nn.Parameter, state: dict[str, Any]) -> int:
        # The first step is the one without a momentum buffer.
        name = "momentum_buffer"
        return 1 if state.get(name) is None and not self._store.has_kind(param, name) else 2


@public_in("deepnvme.optim")
class Adagrad(KernelOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with a faster step, and optionally with state on disk.

    ``swap_dir="/mnt/nvme", memory="512MiB"`` keep the state on disk.

    Args:
        *arguments: the parameters or param groups, and the settings in torch's order.
        **settings: torch's settings by name: ``lr`` (default 1e-2), ``lr_decay`` (0), ``weight_decay`` (0),
            ``initial_accumulator_value`` (0), ``eps`` (1e-10), ``maximize`` (False), ``fused`` (None; True:
            exact square roots).

    Raises:
        ValueError: a setting is out of range, or two of them contradict each other.
        TypeError: a setting is of the wrong type.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = deepnvme.optim.Adagrad(model.parameters(), lr=0.01)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    def _algorithm(self, group: ParamGroup) -> tuple[str, dict[str, float]]:
        _refuse_differentiable(group)
        settings = scalars(group, ("lr", "lr_decay", "eps", "weight_decay"))
        return "adagrad", {**settings, "maximize": bool(group["maximize"])}

    def _moments(self, group: ParamGroup) -> tuple[str, ...]:  # noqa: ARG002
        return ("sum",)

    def _initial(self, param: torch.nn.Parameter, group: ParamGroup) -> float:
        # Rounded to the parameter's dtype, as in torch.
        return float(torch.tensor(group["initial_accumulator_value"], dtype=param.dtype))


class _Lion(torch.optim.Optimizer):
    """The settings and checks that torch provides for its own optimizers."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                msg = f"{name} is {value}; it must be zero or more"
                raise InvalidArgumentError(msg)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            msg = f"betas are {betas}; they must be from 0 to below 1"
            raise InvalidArgumentError(msg)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})


@public_in("deepnvme.optim")
class Lion(KernelOptimizer, _Lion):
    """Lion (Chen et al. 2023): steps of constant size in the direction of an averaged gradient.

    It needs a learning rate three to ten times smaller than AdamW's, and a weight decay larger by the same factor. Its
    state is one moment, ``exp_avg``. The keyword arguments of ``deepnvme.optim`` (``swap_dir``, ``memory``,
    ``moments``, ...) apply in addition.

    Args:
        *arguments: the parameters or param groups, and the settings ``lr``, ``betas`` and ``weight_decay`` in this
            order.
        **settings: ``lr`` (default 1e-4), ``betas`` (default ``(0.9, 0.99)``), ``weight_decay`` (default 0),
            ``maximize`` (default False).

    Raises:
        ValueError: a setting is out of range, or two of them contradict each other.
        TypeError: a setting is of the wrong type.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = deepnvme.optim.Lion(model.parameters(), lr=1e-4)
        >>> model(torch.randn(2, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    def _algorithm(self, group: ParamGroup) -> tuple[str, dict[str, float]]:
        settings = scalars(group, ("lr", "weight_decay"))
        settings["beta1"], settings["beta2"] = map(float, group["betas"])
        return "lion", {**settings, "maximize": bool(group["maximize"])}

    def _moments(self, group: ParamGroup) -> tuple[str, ...]:  # noqa: ARG002
        return ("exp_avg",)
