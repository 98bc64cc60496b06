"""What of a step is done, so that one that stopped half way can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.weak import TensorWeakRef

from deepnvme.errors import StepStoppedError

if TYPE_CHECKING:
    import torch


# The setting of a group that counts its steps; it is saved with the others.
ROUNDS = "rounds"


class Progress:
    """One step that has begun."""

    def __init__(self, clip: float, *, counts: bool) -> None:
        # What gradients are multiplied by, so that their norm is at most so large.
        self.clip = clip
        self._counts = counts
        self._begun: set[int] = set()
        # Parameters, and from which element on.
        self.changed: set[tuple[torch.nn.Parameter, int]] = set()
        # The parameters whose steps were counted, and which count each has.
        self.counted: dict[torch.nn.Parameter, int] = {}
        self._grads: dict[torch.nn.Parameter, tuple[TensorWeakRef, int]] = {}

    def begin(self, index: int, group: dict[str, Any]) -> None:
        """Count the step in the group's settings, once, where nothing else counts it."""
        if self._counts and index not in self._begun:
            self._begun.add(index)
            group[ROUNDS] = group.get(ROUNDS, 0) + 1

    def see(self, param: torch.nn.Parameter) -> None:
        """Remember which gradient it is that a parameter is changed by."""
        if param.grad is not None and param not in self._grads:
            self._grads[param] = (TensorWeakRef(param.grad), param.grad._version)  # noqa: SLF001

    def used(self, param: torch.nn.Parameter) -> None:
        """Expect no gradient of a parameter any more: it was on disk, and was used up."""
        self._grads.pop(param, None)

    def is_same(self) -> bool:
        """Whether all gradients are those that it began with."""
        for param, (seen, version) in self._grads.items():
            grad = param.grad
            if grad is None or seen() is not grad or grad._version != version:  # noqa: SLF001
                return False
        return True

    def stopped(self, error: OSError) -> StepStoppedError:
        """Say where it stands, and what can be done."""
        text = (
            f"{error.strerror or error}; the step stopped half way: {len(self.changed)} parts of the state, and of the "
            "parameters, are those of this step, the others those of the step before. When the disk is well again, "
            "step() with the same gradients goes on where it stopped; otherwise, load the last checkpoint"
        )
        told = (text,) if error.errno is None else (error.errno, text, error.filename)
        found = StepStoppedError(*told)
        found.offset = getattr(error, "offset", None)
        return found
