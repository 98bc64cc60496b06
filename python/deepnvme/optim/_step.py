"""The optimizer step: collect gradients, unscale, clip, and let the kernel update everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from deepnvme._deepnvme import StepGradients
from deepnvme._utils.shards import SplitOver, local, split_as, split_over, total
from deepnvme._utils.tensors import without_gradients
from deepnvme.errors import ClosedError, Error, InvalidArgumentError, UnsupportedError
from deepnvme.optim._gradients import SwappedGradient, in_order
from deepnvme.optim._optimizer import SIXTEEN_BIT_FLOATS, OptimizerBase, ParamGroup
from deepnvme.optim._running_step import STEP_COUNT, Gathered, StepProgress, native_plan
from deepnvme.optim._state_store import FP32, MASTER, MemoryStore, ParameterSlice, flat

if TYPE_CHECKING:
    from deepnvme._deepnvme import StepPlan as NativePlan
    from deepnvme.optim._swap_store import SwapStore


class _GradientGoneError(RuntimeError):
    """Another thread has removed a gradient, as ``close`` does."""


class SteppingOptimizer(OptimizerBase):
    """Makes the step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        With a ``GradScaler`` gradients are unscaled on the fly. Nothing happens if one of them is not finite.

        If the step stops half way, because of a disk error or Ctrl-C, calling it again with the same gradients resumes
        it. Nothing is updated twice.

        Args:
            closure: computes the loss and the gradients first, as in torch. Default: gradients exist already.

        Returns:
            The result of ``closure``, or ``None``.

        Raises:
            ClosedError: the optimizer has state on disk, and was closed.
            StepStoppedError: the disk failed half way.
            UnsupportedError: the disk failed while a gradient was written, so only a part of the gradient is on disk.
            RuntimeError: with ``error_if_nonfinite``, the norm of the gradients is infinite or NaN; or a gradient is
                sparse; or loading of state was interrupted.
            TypeError, ValueError: a parameter has another dtype or is not on the CPU, or a setting is invalid.
        """
        return without_gradients(self._step, closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._check_loaded()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        if found is not None and found.item():
            return loss
        gathered = self._gather()
        is_done = False
        try:
            if self._progress is not None and self._progress.is_split:
                self._update_remaining(self._progress, gathered)
            else:
                self._update_or_report(self._current_progress(gathered), gathered)
                is_done = True
        finally:
            # Neither an unfinished step nor a traceback may keep gradients alive.
            if not is_done:
                gathered.step_gradients.release()
        return loss

    def _update_or_report(self, progress: StepProgress, gathered: Gathered) -> None:
        is_done = False
        try:
            self._update_remaining(progress, gathered)
            is_done = True
        except (UnsupportedError, ClosedError, InvalidArgumentError):
            # Not a disk error: a gradient is gone or partial, the state is gone, or does not fit. Retrying does not
            # help.
            raise
        except Error as error:
            # Not every OSError: a signal handler may raise one.
            raise progress.stopped(error) from error
        finally:
            if is_done or progress.is_untouched:
                self._progress = None

    def _current_progress(self, gathered: Gathered | None = None) -> StepProgress:
        """Return the unfinished step if its gradients still exist; otherwise begin one."""
        progress = self._progress
        if progress is None or not progress.has_same_gradients():
            # The norm of all gradients, even if parameters are updated in several calls.
            clip = 1.0 if self._max_norm is None else self._clip(self._max_norm, gathered or self._gather())
            is_noisy = self._stochastic or self._format is not FP32
            progress = self._progress = StepProgress(clip, counts_in_group=is_noisy and not self._counts_steps)
        return progress

    def _begin_split_step(self) -> StepProgress:
        """Begin a step of several calls (``run_part``), up to :meth:`_end_split_step`. Resumes a stopped step."""
        self._check_loaded()
        return self._current_progress()

    def _end_split_step(self, *, is_done: bool) -> None:
        """End a split step. If it is not done, the next one resumes it."""
        if is_done or self._progress is None or self._progress.is_untouched:
            self._progress = None

    def _update_remaining(self, progress: StepProgress, gathered: Gathered) -> None:
        """Update the parameters that this step has not updated yet."""
        unscale = self._unscale()
        # Another thread's `close` takes the gradients away. Without them the step would seem to be done.
        self._store.check_open()
        progress.note_gradients(gathered.step_gradients)
        for index, group in enumerate(self.param_groups):
            progress.begin(index, group)
            if gathered.step_gradients.counts[index] or gathered.indirect[index]:
                self._update_group(index, group, gathered, progress, unscale)
        gradients = getattr(self._store, "gradients", None)
        if gradients is None:
            return
        for group, indirect in zip(self.param_groups, gathered.indirect, strict=True):
            for member, grad in indirect.items():
                if isinstance(grad, SwappedGradient):
                    param = group["params"][member]
                    # If this stops, the remaining gradients are the ones that were noted, and are dropped next time.
                    param.grad = None
                    progress.gradient_used(param)
                    gradients.drop([param])

    def _update_group(
        self, index: int, group: ParamGroup, gathered: Gathered, progress: StepProgress, unscale: float
    ) -> None:
        algorithm, settings = self._algorithm(group)
        step_gradients, store = gathered.step_gradients, self._store

        def update(batch: tuple[int, torch.Tensor | None] | None = None) -> list[int]:
            return self._kernel.update(
                step_gradients,
                index,
                algorithm,
                settings,
                unscale=unscale,
                clip=progress.clip,
                stochastic=self._stochastic,
                seed=self._noise_seed(group),
                record=progress.updated,
                batch=batch,
            )

        not_planned: list[int] = []
        if step_gradients.counts[index] and isinstance(store, MemoryStore):
            not_planned = update()
            if not_planned:
                self._prepare_members(index, group, not_planned, gathered, progress)
                not_planned = update()
        elif step_gradients.counts[index]:
            not_planned = self._update_on_disk(index, group, gathered, progress, update)
        indirect = dict(gathered.indirect[index])
        # State that fits only after a copy, in each step.
        indirect.update(
            (member, self._gradient(group["params"][member])) for member in not_planned if member not in indirect
        )
        if indirect:
            self._update_indirect(group, indirect, progress, unscale)

    def _update_on_disk(
        self,
        index: int,
        group: ParamGroup,
        gathered: Gathered,
        progress: StepProgress,
        update: Callable[[tuple[int, torch.Tensor | None]], list[int]],
    ) -> list[int]:
        """Update the parameters of the plan, batch by batch. Return the members that it does not contain."""
        plan, step_gradients, store = gathered.plan, gathered.step_gradients, cast("SwapStore", self._store)
        not_planned: dict[int, None] = {}
        stale = step_gradients.stale(index)
        # False if other code, such as `_update_indirect`, has moved state since the plan was found valid. Read first:
        # `_prepare_members` also moves state, which the batches below include.
        is_current = plan.generation == store.generation
        if stale:
            self._prepare_members(index, group, stale, gathered, progress)
            not_planned = dict.fromkeys(step_gradients.stale(index))
        if plan.placed[index] != store.generation:
            # Another param group may have moved state of this one's groups. `placed` is set last, so that Ctrl-C leaves
            # the batches marked as unknown.
            plan.placed[index] = None
            groups, placements = store.batches_of(group["params"], sorted(plan.prepared[index]))
            plan.native.set_batches(index, placements)
            plan.batches[index] = groups
            plan.placed[index] = store.generation
            if is_current:
                plan.generation = store.generation
        for number, (state_group, first) in enumerate(plan.batches[index]):
            if not step_gradients.is_due(index, number, progress.updated):
                continue
            if state_group is None or first is None:
                not_planned.update(dict.fromkeys(update((number, None))))
                continue
            with store.lease_memory(state_group, first) as (memory, _):
                not_planned.update(dict.fromkeys(update((number, memory))))
        return list(not_planned)

    def _prepare_members(
        self, index: int, group: ParamGroup, members: list[int], gathered: Gathered, progress: StepProgress
    ) -> None:
        """Initialise the state of members of a param group, so that the plan finds it."""
        params = group["params"]
        for member in members:
            self._prepare(params[member], group, progress)
        counts = [
            None if self._counts_steps else self._next_count(params[member], self.state[params[member]])
            for member in members
        ]
        # The places of all prepared members are looked up, so that none is left out if an interrupt comes in between.
        gathered.plan.placed[index] = None
        gathered.plan.prepared[index].update(members)
        gathered.plan.native.prepare(index, members, counts)
        gathered.step_gradients.refresh(self.state)

    def _update_indirect(
        self, group: ParamGroup, grads: dict[int, torch.Tensor], progress: StepProgress, unscale: float
    ) -> None:
        """Update parameters outside the plan: their gradients are indirect, or their state fits only after a copy."""
        # Parameters with the same step count and factor share one call of the kernel.
        alike: dict[tuple[int, float], list[ParameterSlice]] = {}
        by_param = {group["params"][member]: grad for member, grad in sorted(grads.items())}
        for param, grad in by_param.items():
            progress.note_gradient(param)
            prepared, step = self._prepare(param, group, progress)
            # An empty parameter counts steps, but has no state.
            if prepared.count:
                alike.setdefault((step, _factor(grad)), []).append(prepared)
        for (step, factor), slices in alike.items():
            self._update_slices(
                group, by_param, slices, progress, step=step, unscale=unscale, clip=progress.clip * factor
            )

    def _noise_seed(self, group: ParamGroup) -> int:
        # Different noise in each step, even without step counts, and reproducible after a restart.
        return int(self._seed << 32 | group.get(STEP_COUNT, 0)) & (1 << 64) - 1

    def _gradient(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient, flat, in the memory order of the parameter; a gradient on disk as it is."""
        grad = None if param.grad is None else local(split_as(param, param.grad))
        if grad is None:
            raise _GradientGoneError("another thread has removed a gradient while step() ran; call step() again")
        if isinstance(grad, SwappedGradient):
            if grad.is_held_by(getattr(self._store, "gradients", None)):
                return grad.checked(param)
            # It belongs to another optimizer.
            grad = grad.read()
        if grad.is_sparse or grad.layout != torch.strided:
            msg = (
                "deepnvme.optim does not support sparse gradients; create the embedding with sparse=False, or give its "
                "parameters to torch.optim.SparseAdam"
            )
            raise RuntimeError(msg)
        if param.is_complex() or param.dtype not in (torch.float32, *SIXTEEN_BIT_FLOATS):
            msg = f"deepnvme.optim supports float32, bfloat16 and float16 parameters, not {param.dtype}"
            raise TypeError(msg)
        if param.device.type != "cpu":
            msg = f"deepnvme.optim supports CPU parameters; this one is on {param.device}: use torch.optim"
            raise InvalidArgumentError(msg)
        return in_order(grad, param)

    def _gather(self) -> Gathered:
        """Collect the gradients of all parameters. Nothing is updated before all of them are known to be usable."""
        params = [group["params"] for group in self.param_groups]
        moments = [self._moments(group) for group in self.param_groups]
        kinds = [
            (names, group.get("initial_accumulator_value"))
            for names, group in zip(moments, self.param_groups, strict=True)
        ]

        def make() -> NativePlan:
            # Others may have replaced parameters.
            self._assign_indices()
            is_in_memory = isinstance(self._store, MemoryStore)
            return native_plan(params, self._places, moments, self._format, in_memory=is_in_memory)

        plan = self._plans.current(
            params,
            kinds,
            self._store.generation,
            make,
        )
        step_gradients = StepGradients(plan.native, self.state)
        try:
            indirect = [
                {member: self._gradient(some[member]) for member in members}
                for some, members in zip(params, step_gradients.indirect, strict=True)
            ]
        except (_GradientGoneError, UnsupportedError):
            # Another thread's `close` takes the gradients away.
            self._store.check_open()
            raise
        return Gathered(plan, step_gradients, indirect)

    def _unscale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale.double().reciprocal().float())

    def _clip(self, max_norm: float, gathered: Gathered) -> float:
        unscale = self._unscale()
        others = [(index, member, one) for index, some in enumerate(gathered.indirect) for member, one in some.items()]
        of_whole, of_shards = list[Any](), list[tuple[SplitOver, float]]()
        for index, member, one in others:
            where = split_over(self.param_groups[index]["params"][member])
            if isinstance(one, SwappedGradient):
                of_shards.append((where, one.squares() * unscale**2))
            elif where[1]:
                of_shards.append((where, self._kernel.measure([one])[0] * unscale**2))
            else:
                of_whole.append((index, member, one))
        squares, _ = self._kernel.measure_all(gathered.step_gradients, of_whole, unscale=unscale)
        norm = math.sqrt(squares + total(of_shards))
        if self._error_if_nonfinite and not math.isfinite(norm):
            msg = (
                f"the norm of the gradients is {norm}, so they cannot be clipped; find the gradient that is not "
                "finite, or omit error_if_nonfinite to scale them by it as torch does"
            )
            raise RuntimeError(msg)
        # As in torch's clip_grad_norm_: a NaN norm makes all gradients NaN.
        coefficient = max_norm / (norm + 1e-6)
        return min(coefficient, 1.0)

    def _prepare(
        self, param: torch.nn.Parameter, group: ParamGroup, progress: StepProgress
    ) -> tuple[ParameterSlice, int]:
        # Raises if the parameter does not fit its state, before anything is noted.
        self._store.follow(param)
        state = self.state[param]
        if not state and not self._store.has(param):
            self._initialise_count(state)
        number, _ = self._places[param]
        count = progress.updated.count_of(number)
        if count is None:
            count = self._next_count(param, state)
            progress.updated.note_count(number, count)
        if self._counts_steps:
            state["step"].fill_(count)
        kinds = self._kinds(param, group)
        self._store.initialise(param, state, kinds)
        return ParameterSlice(param, 0, local(param).numel(), kinds), count

    def _update_slices(
        self,
        group: ParamGroup,
        grads: dict[torch.nn.Parameter, torch.Tensor],
        slices: list[ParameterSlice],
        progress: StepProgress,
        *,
        step: int,
        unscale: float,
        clip: float,
    ) -> None:
        algorithm, settings = self._algorithm(group)
        moments = self._moments(group)
        for given in self._store.batches(slices):
            batch = [one for one in given if self._places[one.param][1] + one.begin not in progress.updated]
            if not batch:
                continue
            with self._store.lease(batch) as leases:
                parts: list[Any] = []
                for one, lease in zip(batch, leases, strict=True):
                    weights = flat(one.param)[one.begin : one.end]
                    grad = grads[one.param]
                    own = lease.grad if isinstance(grad, SwappedGradient) else grad[one.begin : one.end]
                    kept = [lease.state[name] for name in moments]
                    master = lease.state.get(MASTER)
                    at = self._places[one.param][1] + one.begin
                    if master is None:
                        parts.append((weights, own, kept, None, at))
                    else:
                        parts.append((master, own, kept, weights, at))
                self._kernel.step(
                    algorithm,
                    settings,
                    parts,
                    step=step,
                    unscale=unscale,
                    clip=clip,
                    stochastic=self._stochastic,
                    seed=self._noise_seed(group),
                    record=progress.updated,
                )


def _factor(grad: torch.Tensor) -> float:
    return grad.factor if isinstance(grad, SwappedGradient) else 1.0
