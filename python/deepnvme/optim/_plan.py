"""Plans of steps: the parameters of all param groups, and where their state is, kept from step to step.

The extension asks torch for the memory of every tensor in each step, so a plan stays valid when tensors are replaced.
It is made anew when the parameters, the kinds of state, or places on disk change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepnvme._deepnvme import StepPlan as NativePlan
from deepnvme.optim._state_store import scales_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from deepnvme._deepnvme import StepGradients
    from deepnvme.optim._formats import StateFormat
    from deepnvme.optim._layout import StateGroup
    from deepnvme.optim._state_store import ParameterSlice

# Steps of ``offload_parameters`` have a plan for each group of parameters.
_PLANS_MAX = 1 << 10
# The moments of each param group, and other settings that its kinds of state depend on.
Kinds = list[tuple[Any, ...]]


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
        [[entry for name in names for entry in scales_of(name, moment_format)] for names in moments],
        moments=moment_format.name,
        in_memory=in_memory,
    )
