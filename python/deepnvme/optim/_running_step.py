"""A step while it runs: its plan, and its progress, so that a stopped one can resume.

A plan lists the parameters of all param groups, and where their state is. It is kept from step to step. The extension
asks torch for the memory of every tensor in each step, so a plan stays valid when tensors are replaced. It is made anew
when the parameters, the kinds of state, or places on disk change.
"""

from __future__ import annotations

from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.weak import TensorWeakRef

from deepnvme._deepnvme import StepPlan as NativePlan
from deepnvme._deepnvme import StepRecord
from deepnvme._utils.shards import local
from deepnvme.errors import StepStoppedError
from deepnvme.optim._state_store import state_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from deepnvme._deepnvme import StepGradients
    from deepnvme.optim._layout import StateGroup
    from deepnvme.optim._state_store import ParameterSlice, StateFormat

# Steps of ``offload_parameters`` have a plan for each group of parameters.
_PLANS_MAX = 1 << 10
# The moments of each param group, and other settings that its kinds of state depend on.
Kinds = list[tuple[Any, ...]]
# Setting of a param group that counts its steps. Saved states contain this name, so it stays.
STEP_COUNT = "rounds"
# The step that the running call is a part of.
_CURRENT: ContextVar[StepProgress | None] = ContextVar("step", default=None)


@dataclass(eq=False)
class Plan:
    """A plan, and what it is valid for."""

    native: NativePlan
    kinds: Kinds
    # Of the places on disk.
    generation: int
    # Members of each param group whose state is initialised.
    prepared: list[set[int]]
    # For state on disk: each batch of each param group, and its first slice. `None` if the group has no state.
    batches: list[list[tuple[StateGroup | None, ParameterSlice | None]]]
    # The generation of places that the batches of each param group are of. `None` before they are known.
    placed: list[int | None]


@dataclass(eq=False)
class Gathered:
    """The gradients of a step.

    Indirect gradients are those that the kernel cannot use as they are in memory (`is_plain` in step_gradients.rs).
    """

    plan: Plan
    step_gradients: StepGradients
    # The flat, indirect gradients of each param group, by member.
    indirect: list[dict[int, torch.Tensor]]


@dataclass(eq=False)
class StepPlans:
    """The plans of an optimizer, by number of parameters and first parameter of each param group."""

    # Plans made so far. Tests count them.
    made: int = 0
    _plans: dict[tuple[tuple[int, int], ...], Plan] = field(default_factory=dict)

    def current(
        self, params: list[list[torch.nn.Parameter]], kinds: Kinds, generation: int, make: Callable[[], NativePlan]
    ) -> Plan:
        """Return the plan of these parameters. Make it if there is none, or if it is no longer valid."""
        # A plan keeps its parameters alive, so no other object can have their `id`.
        key = tuple((len(some), id(some[0]) if some else 0) for some in params)
        plan = self._plans.get(key)
        if plan is None or plan.generation != generation or plan.kinds != kinds or not plan.native.is_of(params):
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            self.made += 1
            plan = Plan(
                make(), kinds, generation, [set() for _ in params], [[] for _ in params], [None for _ in params]
            )
            self._plans[key] = plan
        return plan


def native_plan(
    params: list[list[torch.nn.Parameter]],
    places: dict[torch.nn.Parameter, tuple[int, int]],
    moments: Sequence[tuple[str, ...]],
    moment_format: StateFormat,
    *,
    in_memory: bool,
) -> NativePlan:
    """Make a plan of the extension. ``places``: number and first index of each parameter."""
    return NativePlan(
        params,
        [[places[param] for param in some] for some in params],
        [[entry for name in names for entry in state_names(name, moment_format)] for names in moments],
        moments=moment_format.name,
        in_memory=in_memory,
    )


class StepProgress:
    """A step that has begun.

    It may stop anywhere, when the disk fails or at Ctrl-C between any two calls. So the call that updates elements also
    records them (``updated``). Everything else is noted before it is done, so that it can be repeated.

    ``counts_in_group``: whether the param group counts steps, because no state does.
    """

    def __init__(self, clip: float, *, counts_in_group: bool) -> None:
        # Factor for gradients that limits their norm.
        self.clip = clip
        self._counts_in_group = counts_in_group
        # Param groups that have begun the step, with their step counts.
        self._step_counts: dict[int, int] = {}
        # The updated slices by their first element, and the parameters whose step count has changed.
        self.updated = StepRecord()
        # Gradients that the extension has noted, in each call.
        self._step_gradients: list[StepGradients] = []
        # The other gradients. ``None`` for a used one.
        self._grads: dict[torch.nn.Parameter, tuple[TensorWeakRef, int] | None] = {}

    def begin(self, index: int, group: dict[str, Any]) -> None:
        """Count the step in the group's settings, once, if nothing else counts it."""
        if self._counts_in_group:
            group[STEP_COUNT] = self._step_counts.setdefault(index, group.get(STEP_COUNT, 0) + 1)

    def note_gradients(self, step_gradients: StepGradients) -> None:
        """Remember the gradients of a call."""
        self._step_gradients.append(step_gradients)

    def note_gradient(self, param: torch.nn.Parameter) -> None:
        """Remember the gradient by which a parameter is updated."""
        if param.grad is not None and param not in self._grads:
            grad = local(param.grad)
            self._grads[param] = (TensorWeakRef(grad), grad._version)  # noqa: SLF001

    def gradient_used(self, param: torch.nn.Parameter) -> None:
        """Expect no further gradient of a parameter: it was used."""
        self._grads[param] = None

    def run_part(self, step: Callable[[], Any]) -> Any:
        """Call an optimizer's ``step`` as one of several parts of this step."""
        # The context ends with the call, whatever interrupts it; a flag might stay set.
        return copy_context().run(self._run_part, step)

    def _run_part(self, step: Callable[[], Any]) -> Any:
        _CURRENT.set(self)
        return step()

    @property
    def is_split(self) -> bool:
        """Whether the running call is one of several parts of this step."""
        return _CURRENT.get() is self

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was updated or counted yet."""
        return not self._step_counts and self.updated.is_empty

    def has_same_gradients(self) -> bool:
        """Whether all existing gradients are the ones the step began with."""
        for param, seen in self._grads.items():
            grad = None if param.grad is None else local(param.grad)
            # A gradient that is gone was used as far as needed: nothing is updated by it again.
            if grad is not None and (seen is None or seen[0]() is not grad or grad._version != seen[1]):  # noqa: SLF001
                return False
        return all(one.is_same() for one in self._step_gradients)

    def stopped(self, error: OSError) -> StepStoppedError:
        """Make the error that states the progress and the remedy."""
        text = (
            f"{error.strerror or error}; the step stopped half way: {len(self.updated)} slices of parameters are "
            "updated, with their state, and the others are not. Once the disk works again, step() with the same "
            "gradients goes on where it stopped; otherwise load the last checkpoint"
        )
        arguments = (text,) if error.errno is None else (error.errno, text, error.filename)
        found = StepStoppedError(*arguments)
        found.offset = getattr(error, "offset", None)
        return found
