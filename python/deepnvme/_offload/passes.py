"""A block on its way through forward and backward: its units are in memory in both, and not between."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as tree

from deepnvme._offload.autograd import places_saved
from deepnvme._offload.residence import Holder

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from deepnvme._offload.groups import Block, Unit
    from deepnvme._offload.residence import Residence

# The number of the backward pass that is under way, where none is.
_NO_BACKWARD = -1


class Passes:
    """Runs blocks.

    Args:
        residence: has their units.
        through: is called with each unit of which no more gradients will come in a backward pass.
    """

    def __init__(self, residence: Residence, through: Callable[[Unit], None]) -> None:
        self._residence, self._through = residence, through
        # How often blocks have used a unit in forward passes, and not yet in backward passes.
        self._uses: Counter[Unit] = Counter()
        # Whether there will be a backward pass of this forward pass. Checkpointed blocks run without gradients in it.
        self.counts_uses = True
        # Those whose backward has begun and not ended.
        self._open: dict[int, _Pass] = {}

    def around(self, block: Block) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Run a block's forward with its units in place."""

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                # What a checkpoint runs again in the backward pass was counted.
                if self.counts_uses and torch._C._current_graph_task_id() == _NO_BACKWARD:  # noqa: SLF001
                    self._uses.update(block.units)
                with self._residence.held(block.units):
                    if not torch.is_grad_enabled():
                        with _without_copies():
                            return forward(*args, **kwargs)
                    one = _Pass(self, block)
                    args, kwargs = one.gate(args, kwargs)
                    with _without_copies(), places_saved(self._residence, block.units, one.begin):
                        return one.watch(forward(*args, **kwargs))

            return run

        return wrap

    def begin(self, one: _Pass) -> None:
        """Have the units of a block for its backward."""
        if id(one) in self._open:
            return
        if not self._open:
            # What is open still when the backward is through: blocks of which no input needs a gradient.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001
        else:
            # A block that has computed its last gradient without anybody being told.
            for other in [*self._open.values()]:
                if not other.has_gate:
                    self.end(other)
        # First of all: where an interrupt comes between, whoever ends what is open releases the units.
        self._open[id(one)] = one
        try:
            for unit in one.block.units:
                self._residence.hold(unit, one)
        except BaseException:
            self._release(one)
            raise

    def end(self, one: _Pass) -> None:
        """Need them no more: the gradients that this call of the block gives are there."""
        if not self._release(one):
            return
        self._uses.subtract(one.block.units)
        for unit in one.block.units:
            if self._uses[unit] <= 0:
                self._through(unit)

    def end_all(self) -> None:
        """The backward has failed, or will never be."""
        for one in [*self._open.values()]:
            self._release(one)
        self._residence.release_lost()

    def end_failed(self) -> None:
        """Need nothing for a backward that was interrupted, and is not under way any more."""
        if torch._C._current_graph_task_id() == _NO_BACKWARD:  # noqa: SLF001
            self.end_all()

    def end_step(self) -> None:
        """What was used and got no gradients will get none."""
        self._uses.clear()

    def _end_backward(self) -> None:
        for one in [*self._open.values()]:
            self.end(one)

    def _release(self, one: _Pass) -> bool:
        if id(one) not in self._open:
            return False
        self._residence.release(one)
        del self._open[id(one)]
        return True


class _Pass(Holder):
    """One call of a block."""

    def __init__(self, passes: Passes, block: Block) -> None:
        self._passes = passes
        self.block = block
        self.has_gate = False

    def begin(self) -> None:
        self._passes.begin(self)

    def gate(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Have the end of the backward noticed: what gives inputs their gradients is the last of it."""
        flat, shape = tree.tree_flatten((args, kwargs))
        places = [place for place, value in enumerate(flat) if isinstance(value, torch.Tensor) and value.requires_grad]
        if not places:
            return args, kwargs
        self.has_gate = True
        gated = _Gate.apply(self, *(flat[place] for place in places))
        for place, tensor in zip(places, gated, strict=True):
            flat[place] = tensor
        args, kwargs = tree.tree_unflatten(flat, shape)
        return args, kwargs

    def end(self) -> None:
        self._passes.end(self)

    def watch(self, output: Any) -> Any:
        """Have the beginning of the backward noticed: the gradient of an output comes first."""
        for tensor in tree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]
        return output

    def _begin(self, _gradient: torch.Tensor) -> None:
        self.begin()


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: _Pass, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.one = one
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.one.end()
        return None, *gradients


def _without_copies() -> AbstractContextManager[Any]:
    """Have autocast keep no copies of weights in its lower precision, which would be all of them at the end."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)
    return nullcontext()
