"""Run an optimizer over parameters on disk, group by group, each in memory while it is updated.

Either ``step()`` updates all of them, or each is updated as soon as its backward pass is done, while it is in memory
anyway. Then ``step()`` updates the rest and ends the step.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepnvme._deepnvme import _call_with_params
from deepnvme._utils.interrupts import is_of_handler
from deepnvme.errors import ClosedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepnvme._offload.groups import ParameterGroup
    from deepnvme._offload.residence import Residence

_SUPPORTS_SCALING = "_step_supports_amp_scaling"
# Attribute of a `step` that a learning-rate scheduler has wrapped.
_WRAPPED_BY_SCHEDULER = "_wrapped_by_lr_sched"


def _remove_all(hooks: dict[int, Any]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def _check_supported(optimizer: torch.optim.Optimizer, *, in_backward: bool) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS needs all parameters in memory at once; use AdamW, for example")
    if in_backward and getattr(optimizer, "_max_norm", None) is not None:
        raise UnsupportedError(
            "max_norm needs the gradients of all parameters before the first one is changed, but in_backward changes a "
            "block's parameters before other blocks have gradients; drop one of the two"
        )


def _refuse_averaged(params: set[int]) -> None:
    """Refuse to update parameters whose gradients ``DistributedDataParallel`` averages after the update."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    for wrapper in gc.get_objects():
        is_wrapper = isinstance(wrapper, nn.parallel.DistributedDataParallel)
        if is_wrapper and wrapper.process_group.size() > 1 and any(id(one) in params for one in wrapper.parameters()):
            raise UnsupportedError(
                "DistributedDataParallel averages gradients after in_backward has changed parameters with them, so the "
                "processes would diverge; attach without in_backward"
            )


class OptimizerStepper:
    """Replaces an optimizer's ``step``.

    Args:
        optimizer: the optimizer of the model's parameters.
        residence: holds the groups.
        group_of: the group of a parameter, by its ``id``.
        in_backward: whether to update groups during the backward pass.
        on_begin: called when a step begins; a backward pass may have been interrupted before.
        on_end: called when a step has ended.

    Raises:
        UnsupportedError: the optimizer treats parameters together, or clips by their total norm during the backward
            pass.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        residence: Residence,
        group_of: dict[int, ParameterGroup],
        *,
        in_backward: bool,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        _check_supported(optimizer, in_backward=in_backward)
        self._residence, self._group_of, self._on_begin, self._on_end = residence, group_of, on_begin, on_end
        # Weak, since the optimizer's `step` refers to this object.
        self._optimizer = weakref.ref(optimizer)
        self._is_closed = False
        self._in_backward = in_backward
        self._hooks: dict[int, Any] = {}
        # Also without a `close`: the parameters may outlive the optimizer.
        weakref.finalize(self, _remove_all, self._hooks).atexit = False
        # Parameters whose gradients are complete in this backward pass.
        self._complete: set[int] = set()
        # Whether a step has begun and not ended.
        self._is_begun = False
        # Whether the search for wrappers that average gradients was made. It looks at all objects of the process.
        self._is_searched = not in_backward
        # The progress of that step. `None` if the optimizer does not track it.
        self._progress: Any = None
        # The parameters of each group, by param group. `None`: of no group.
        self._by_group: dict[ParameterGroup | None, list[list[nn.Parameter]]] = {}
        # The `id` of each parameter in `_by_group`.
        self._known: set[int] = set()
        # Groups that a backward pass has updated or was interrupted at, for optimizers that track no progress: they are
        # not updated again.
        self._attempted: set[ParameterGroup] = set()
        # An update during the backward pass failed. `step` tries again and raises the error.
        self._has_failed = False
        # Makes a `GradScaler` pass its scale to `step`; otherwise torch's own optimizers do not learn of it.
        self._supported_scaling = getattr(optimizer, _SUPPORTS_SCALING, None)
        self._original_step = optimizer.step
        # The step that another object has set, such as a learning-rate scheduler; `None` for that of the class.
        self._own_step = optimizer.__dict__.get("step")
        self._step_method: Any = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's ``step``. ``close`` undoes it, even if it was interrupted."""
        self._replace_step(optimizer)
        if self._in_backward:
            setattr(optimizer, _SUPPORTS_SCALING, True)
            self._watch()
        if hasattr(optimizer, "_detach_on_close"):
            optimizer._detach_on_close(self.abandon)  # noqa: SLF001

    def _replace_step(self, optimizer: torch.optim.Optimizer) -> None:

        is_of_scheduler = hasattr(optimizer.step, _WRAPPED_BY_SCHEDULER)

        def step(own: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if is_of_scheduler:
                own._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
            return self._step(closure)

        if is_of_scheduler:
            # A scheduler that was made before has wrapped `step`. It warns if the mark of that is gone.
            setattr(step, _WRAPPED_BY_SCHEDULER, True)

        # Learning-rate schedulers require a method.
        self._step_method = types.MethodType(step, optimizer)
        optimizer.step = self._step_method  # type: ignore[method-assign]

    def is_attached_to(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the stepper of the optimizer."""
        return not self._is_closed and self._optimizer() is optimizer

    @property
    def is_begun(self) -> bool:
        """Whether some parameters were updated by a step that has not ended."""
        return self._is_begun

    def close(self) -> None:
        """Give the optimizer its own ``step`` back, after the next one if a backward pass has begun it."""
        _remove_all(self._hooks)
        optimizer = self._optimizer()
        if optimizer is not None and self._in_backward:
            if self._supported_scaling is None:
                optimizer.__dict__.pop(_SUPPORTS_SCALING, None)
            else:
                setattr(optimizer, _SUPPORTS_SCALING, self._supported_scaling)
        self._in_backward, self._is_closed = False, True
        if not self._is_begun:
            self._restore_step()

    def abandon(self) -> None:
        """Close although a step has begun: the optimizer was closed and will not end it."""
        self._is_begun = False
        self._attempted.clear()
        self._by_group, self._progress = {}, None
        self.close()

    def _restore_step(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if self._step_method is None or optimizer.__dict__.get("step") is not self._step_method:
            return  # it was never replaced, or a wrapper surrounds this step and keeps calling it
        if self._own_step is None:
            del optimizer.step
        else:
            optimizer.step = self._own_step  # type: ignore[method-assign]

    def on_backward_done(self, group: ParameterGroup) -> None:
        """Update a group that will get no more gradients in this pass.

        Errors are not raised here. The gradients stay, and ``step`` fails with the same error.
        """
        own = [member.parameter for member in group.members if id(member.parameter) in self._hooks]
        is_due = not self._is_closed and bool(own) and all(id(one) in self._complete for one in own)
        if not is_due or self._has_failed or self._residence.is_held(group):
            return
        try:
            self._begin_step()
            self._update_group(group, frees=True)
        except Exception as error:  # the backward pass goes on, and `step` comes to the same error
            self._has_failed = True
            if is_of_handler(error):
                raise

    def _watch(self) -> None:
        optimizer = self._optimizer()
        known = weakref.ref(self)

        def arrived(param: torch.Tensor) -> None:
            stepper = known()
            if stepper is not None:
                stepper._complete.add(id(param))  # noqa: SLF001

        for param_group in [] if optimizer is None else optimizer.param_groups:
            for param in param_group["params"]:
                if param.requires_grad and id(param) not in self._hooks and id(param) in self._group_of:
                    self._hooks[id(param)] = param.register_post_accumulate_grad_hook(arrived)

    def _begin_step(self) -> None:
        """Begin a step, unless one has begun."""
        optimizer = self._optimizer()
        if optimizer is None or self._is_begun:
            return
        if not self._is_searched:
            _refuse_averaged({*self._hooks})
            self._is_searched = True
        # Repeats the clean-up of the last step, which Ctrl-C may have skipped.
        self._attempted.clear()
        self._by_group, self._known = {}, set()
        self._sort_parameters(optimizer)
        # An optimizer that can resume needs to know where a step begins and ends.
        if hasattr(optimizer, "_begin_split_step"):
            self._progress = optimizer._begin_split_step()  # noqa: SLF001
        self._is_begun = True

    def _sort_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the group of each parameter, even of those that were added since the step began."""
        for index, param_group in enumerate(optimizer.param_groups):
            for one in param_group["params"]:
                if id(one) in self._known:
                    continue
                lists = self._by_group.setdefault(self._group_of.get(id(one)), [])
                lists.extend([] for _ in range(index + 1 - len(lists)))
                lists[index].append(one)
                self._known.add(id(one))

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        # After `unscale_`, only `found_inf` is set.
        scaler = ("grad_scale", "found_inf")
        if self._in_backward and any(getattr(self._optimizer(), name, None) is not None for name in scaler):
            raise UnsupportedError(
                "a GradScaler checks all gradients before the first parameter is changed, but in_backward "
                "changes parameters with scaled gradients; attach without in_backward, or train in bfloat16"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._on_begin()
        self._begin_step()
        if not self._is_begun:
            return loss
        is_done = False
        try:
            self._update_rest()
            is_done = True
        except (UnsupportedError, ClosedError):
            raise
        except OSError as error:
            if self._progress is None or is_of_handler(error):
                raise
            raise self._progress.stopped(error) from error
        finally:
            # First, and without a call: an interrupt may come after each.
            self._is_begun = False
            self._end_step(is_done=is_done)
            self._has_failed = False
            self._complete.clear()
            self._attempted.clear()
            self._by_group, self._progress = {}, None
            self._on_end()
            if self._in_backward:
                # Parameters may have been added in the meantime.
                self._watch()
            if self._is_closed:
                self._restore_step()
        return loss

    def _update_rest(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            self._sort_parameters(optimizer)
        # Resident parameters come first. The call counts as a step even if there are none.
        self._call(self._by_group.get(None, []))
        for group, lists in self._by_group.items():
            if group in self._attempted:
                self._free_gradients(lists)
            elif group is not None and any(one.grad is not None for params in lists for one in params):
                self._update_group(group, frees=False)

    def _end_step(self, *, is_done: bool) -> None:
        optimizer: Any = self._optimizer()
        if optimizer is not None and self._progress is not None:
            optimizer._end_split_step(is_done=is_done)  # noqa: SLF001

    def _update_group(self, group: ParameterGroup, *, frees: bool) -> None:
        lists = self._by_group[group]
        with self._residence.held([group], exclusive=True):
            if frees and self._progress is None:
                self._attempted.add(group)
            try:
                self._call(lists)
            except Exception:
                self._attempted.discard(group)
                raise
            if frees:
                self._free_gradients(lists)
                self._attempted.discard(group)

    def _call(self, lists: list[list[nn.Parameter]]) -> None:
        """Make the optimizer's own step, with these parameters of each param group."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        step = self._original_step
        if self._progress is not None:
            step = functools.partial(self._progress.run_part, step)
        # Wrappers and their optimizer share the dicts of param groups, so these have the parameters of the call. Native
        # code restores them: Ctrl-C could come before Python code does.
        _call_with_params(optimizer.param_groups, lists, step)

    def _free_gradients(self, lists: list[list[nn.Parameter]]) -> None:
        """Free used gradients, to make room for the gradients of the next block."""
        for params in lists:
            for one in params:
                # Free first: once `gradient_used` is called, an existing gradient counts as a new one.
                one.grad = None
                if self._progress is not None:
                    self._progress.gradient_used(one)
                self._complete.discard(id(one))
