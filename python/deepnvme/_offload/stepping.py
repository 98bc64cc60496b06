"""Steps of an optimizer whose parameters are on disk: one unit after the other, in memory while it is changed.

Either all of them are changed in ``step()``, or each as soon as its backward pass is through, while it is in memory
anyway; ``step()`` then changes what is left, and ends the step.
"""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.errors import ClosedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from deepnvme._offload.groups import Unit
    from deepnvme._offload.residence import Residence

_SUPPORTS_SCALING = "_step_supports_amp_scaling"


class Stepping:
    """Takes the place of an optimizer's ``step``.

    Args:
        optimizer: of the model's parameters.
        residence: has the units.
        unit_of: the unit of a parameter, by its ``id``.
        in_backward: whether units are changed in the backward pass.
        begins: is called when a step begins, and a backward pass may have been interrupted.
        ended: is called when a step has ended.

    Raises:
        UnsupportedError: the optimizer treats parameters together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        residence: Residence,
        unit_of: dict[int, Unit],
        *,
        in_backward: bool,
        begins: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS needs all parameters at a time, and they are on disk; AdamW, for one, does not"
            )
        if in_backward and getattr(optimizer, "_max_norm", None) is not None:
            raise UnsupportedError(
                "max_norm needs the gradients of all parameters before the first of them is changed, and in_backward "
                "changes those of a block before the others have any; one of the two has to go"
            )
        self._residence, self._unit_of, self._begins, self._ended = residence, unit_of, begins, ended
        # The optimizer has this, by its `step`.
        self._optimizer = weakref.ref(optimizer)
        self._plain = optimizer.step
        self._in_backward = in_backward
        self._hooks: dict[int, Any] = {}
        # Those whose gradients are complete, in this backward pass.
        self._arrived: set[int] = set()
        # Whether a step has begun, and what is done of it, where the optimizer knows; all parameters, and each unit's.
        self._is_begun = False
        self._progress: Any = None
        self._all: list[list[nn.Parameter]] = []
        self._by_unit: dict[Unit | None, list[list[nn.Parameter]]] = {}
        # Whether the optimizer's groups have some of their parameters only.
        self._is_narrow = False
        # Units that a backward pass has changed, or was interrupted at, where the optimizer does not know what is done:
        # it changes none of them again.
        self._tried: set[Unit] = set()
        # Something went wrong in the backward pass: `step` tries again, and says so.
        self._waits = False

        def step(_own: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        # Schedulers want a method.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        if in_backward:
            # Has a `GradScaler` say to `step` that it scales: torch's own optimizers hear nothing of it as a rule.
            self._supported_scaling = getattr(optimizer, _SUPPORTS_SCALING, False)
            setattr(optimizer, _SUPPORTS_SCALING, True)
            self._watch()

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is this optimizer's."""
        return self._optimizer() is optimizer

    @property
    def is_begun(self) -> bool:
        """Whether some parameters were changed by a step that has not ended."""
        return self._is_begun

    def close(self) -> None:
        """Change nothing in backward passes any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._in_backward = False
        optimizer = self._optimizer()
        if optimizer is not None:
            setattr(optimizer, _SUPPORTS_SCALING, self._supported_scaling)

    def backward_through(self, unit: Unit) -> None:
        """Change a unit of which there will be no more gradients in this pass.

        Nothing is raised here: the gradients stay where it fails, and ``step`` says why.
        """
        own = [member.parameter for member in unit.members if id(member.parameter) in self._hooks]
        is_due = bool(own) and all(id(one) in self._arrived for one in own)
        if not is_due or self._waits or self._residence.is_held(unit):
            return
        try:
            self._begin()
            self._change(unit, frees=True)
        except Exception:  # noqa: BLE001 - the backward pass goes on, and `step` comes to the same error
            self._waits = True

    def _watch(self) -> None:
        optimizer = self._optimizer()
        known = weakref.ref(self)

        def arrived(param: torch.Tensor) -> None:
            stepping = known()
            if stepping is not None:
                stepping._arrived.add(id(param))  # noqa: SLF001

        for group in [] if optimizer is None else optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and id(param) not in self._hooks and id(param) in self._unit_of:
                    self._hooks[id(param)] = param.register_post_accumulate_grad_hook(arrived)

    def _begin(self) -> None:
        """Begin a step, unless one has begun."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self._widen(optimizer)
        if self._is_begun:
            return
        self._all = [list(group["params"]) for group in optimizer.param_groups]
        self._by_unit = {}
        for index, params in enumerate(self._all):
            for one in params:
                unit = self._unit_of.get(id(one))
                self._by_unit.setdefault(unit, [[] for _ in self._all])[index].append(one)
        # What goes on where a step stopped goes by whole steps.
        if hasattr(optimizer, "begin_whole"):
            self._progress = optimizer.begin_whole()
        self._is_begun = True

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        # Whoever unscales beforehand leaves the second of them only.
        scaler = ("grad_scale", "found_inf")
        if self._in_backward and any(getattr(self._optimizer(), name, None) is not None for name in scaler):
            raise UnsupportedError(
                "a GradScaler looks at all gradients before the first parameter is changed, and in_backward has "
                "changed parameters by scaled ones; attach the optimizer without in_backward, or train in bfloat16"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begins()
        self._begin()
        if not self._is_begun:
            return loss
        is_done = False
        try:
            self._change_rest()
            is_done = True
        except (UnsupportedError, ClosedError):
            raise
        except OSError as error:
            if self._progress is None:
                raise
            raise self._progress.stopped(error) from error
        finally:
            self._end(is_done=is_done)
            self._waits = False
            self._arrived.clear()
            self._tried.clear()
            self._by_unit, self._progress = {}, None
            self._ended()
            if self._in_backward:
                # Parameters may have been added since.
                self._watch()
        return loss

    def _change_rest(self) -> None:
        # What is in memory for good comes first; a step of nothing counts, for whoever counts calls.
        self._call(self._by_unit.get(None) or [[] for _ in self._all])
        for unit, lists in self._by_unit.items():
            if unit in self._tried:
                self._free(lists)
            elif unit is not None and any(one.grad is not None for params in lists for one in params):
                self._change(unit, frees=False)

    def _end(self, *, is_done: bool) -> None:
        optimizer: Any = self._optimizer()
        self._is_begun = False
        if optimizer is not None and self._progress is not None:
            optimizer.end_whole(is_done=is_done)

    def _change(self, unit: Unit, *, frees: bool) -> None:
        lists = self._by_unit[unit]
        with self._residence.held([unit], exclusive=True):
            if frees and self._progress is None:
                self._tried.add(unit)
            try:
                self._call(lists)
            except Exception:
                self._tried.discard(unit)
                raise
            if frees:
                self._free(lists)
                self._tried.discard(unit)

    def _call(self, lists: list[list[nn.Parameter]]) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        try:
            self._is_narrow = True
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params
            self._plain()
        finally:
            self._widen(optimizer)

    def _widen(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the groups all their parameters again; where an interrupt comes between, the next step does."""
        if self._is_narrow:
            for group, params in zip(optimizer.param_groups, self._all, strict=True):
                group["params"] = params
            self._is_narrow = False

    def _free(self, lists: list[list[nn.Parameter]]) -> None:
        """Free gradients that were used: those of the next block come now."""
        for params in lists:
            for one in params:
                # In this order: what is there still, and was seen, is known to have been used.
                one.grad = None
                if self._progress is not None:
                    self._progress.used(one)
                self._arrived.discard(id(one))
