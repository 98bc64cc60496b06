"""What of a step is done, so that one that stopped half way can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.weak import TensorWeakRef

from deepnvme._deepnvme import StepRecord
from deepnvme.errors import StepStoppedError

if TYPE_CHECKING:
    import torch


# The setting of a group that counts its steps; it is saved with the others.
ROUNDS = "rounds"


class StepProgress:
    """One step that has begun.

    It may stop anywhere: where the disk fails, and between any two calls where Ctrl-C is pressed. So what has changed
    is written down by the call that changes it (``record``). All else is decided and noted first, and done then, so
    that it can be done again.
    """

    def __init__(self, clip: float, *, counts: bool) -> None:
        # What gradients are multiplied by, so that their norm is at most so large.
        self.clip = clip
        self._counts = counts
        # The rounds of groups that have begun, and which round each has.
        self._rounds: dict[int, int] = {}
        # The numbers of the first elements of what has changed.
        self.record = StepRecord()
        # The parameters whose steps were counted, and which count each has.
        self.counted: dict[torch.nn.Parameter, int] = {}
        # ``None`` for a gradient that was used up.
        self._grads: dict[torch.nn.Parameter, tuple[TensorWeakRef, int] | None] = {}

    def begin(self, index: int, group: dict[str, Any]) -> None:
        """Count the step in the group's settings, once, where nothing else counts it."""
        if self._counts:
            group[ROUNDS] = self._rounds.setdefault(index, group.get(ROUNDS, 0) + 1)

    def note_gradient(self, param: torch.nn.Parameter) -> None:
        """Remember which gradient it is that a parameter is changed by."""
        if param.grad is not None and param not in self._grads:
            self._grads[param] = (TensorWeakRef(param.grad), param.grad._version)  # noqa: SLF001

    def gradient_used(self, param: torch.nn.Parameter) -> None:
        """Expect no gradient of a parameter any more: it was used up."""
        self._grads[param] = None

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was changed or counted yet."""
        return not (self._rounds or self.counted or len(self.record))

    def is_same(self) -> bool:
        """Whether all gradients that there are are those that it began with."""
        for param, seen in self._grads.items():
            grad = param.grad
            # One that is gone was used, as far as it has to be: nothing is changed by it again.
            if grad is not None and (seen is None or seen[0]() is not grad or grad._version != seen[1]):  # noqa: SLF001
                return False
        return True

    def stopped(self, error: OSError) -> StepStoppedError:
        """Say where it stands, and what can be done."""
        text = (
            f"{error.strerror or error}; the step stopped half way: {len(self.record)} parts of the state, and of the "
            "parameters, are those of this step, the others those of the step before. When the disk is well again, "
            "step() with the same gradients goes on where it stopped; otherwise, load the last checkpoint"
        )
        arguments = (text,) if error.errno is None else (error.errno, text, error.filename)
        found = StepStoppedError(*arguments)
        found.offset = getattr(error, "offset", None)
        return found
