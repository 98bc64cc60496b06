"""Track what is done of a step, so that a stopped one can resume."""

from __future__ import annotations

from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from torch.utils.weak import TensorWeakRef

from deepnvme._deepnvme import StepRecord
from deepnvme.errors import StepStoppedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from deepnvme._deepnvme import StepGradients


# Setting of a param group that counts its steps. Saved states contain this name, so it stays.
STEP_COUNT = "rounds"
# The step that the running call is a part of.
_CURRENT: ContextVar[StepProgress | None] = ContextVar("step", default=None)


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
            self._grads[param] = (TensorWeakRef(param.grad), param.grad._version)  # noqa: SLF001

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
            grad = param.grad
            # A gradient that is gone was used as far as needed: nothing is updated by it again.
            if grad is not None and (seen is None or seen[0]() is not grad or grad._version != seen[1]):  # noqa: SLF001
                return False
        return all(one.is_same() for one in self._step_gradients)

    def stopped(self, error: OSError) -> StepStoppedError:
        """Make the error that states the progress and the remedy."""
        text = (
            f"{error.strerror or error}; the step stopped half way: {len(self.updated)} parts of the parameters and "
            "their state are updated, the others are not. Once the disk works again, step() with the same gradients "
            "goes on where it stopped; otherwise load the last checkpoint"
        )
        arguments = (text,) if error.errno is None else (error.errno, text, error.filename)
        found = StepStoppedError(*arguments)
        found.offset = getattr(error, "offset", None)
        return found
