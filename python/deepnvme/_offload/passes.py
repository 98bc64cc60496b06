"""Run blocks: their groups are in memory during forward and backward, and not between."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as tree

from deepnvme._modules.calls import refuse_recording, with_copies
from deepnvme._offload.autograd import drop_stale_hooks, save_references
from deepnvme._offload.residence import Holder
from deepnvme._utils.tensors import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from deepnvme._offload.groups import Block, ParameterGroup
    from deepnvme._offload.residence import Residence

# torch's graph task id outside of a backward pass.
_NO_BACKWARD = -1


class BlockRunner:
    """Runs blocks.

    Args:
        residence: holds their groups.
        on_group_done: called with each group that will get no more gradients in this backward pass.
    """

    def __init__(self, residence: Residence, on_group_done: Callable[[ParameterGroup], None]) -> None:
        self._residence, self._on_group_done = residence, on_group_done
        # Uses of a group in forward passes that backward passes have not matched yet.
        self._uses: Counter[ParameterGroup] = Counter()
        # Whether a backward pass follows. Checkpointed blocks run without gradients even then.
        self.counts_uses = True
        # Block calls whose backward has begun and not ended.
        self._in_backward: dict[int, _BlockCall] = {}
        # The innermost running call of each thread, since a block may call another one.
        self._innermost: dict[int, _BlockCall | None] = {}
        # Torch frees it when the backward pass ends or fails.
        self._backward: weakref.ref[_BackwardEnd] | None = None

    def wrapper_for(self, block: Block) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a wrapper that runs a block's forward with its groups in memory."""

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                refuse_recording("an offloaded model", (*args, *kwargs.values()))
                thread = threading.get_ident()
                before = self._residence.calls.get(thread, 0)
                try:
                    self._residence.calls[thread] = before + 1
                    return run_held(*args, **kwargs)
                finally:
                    self._residence.calls[thread] = before

            def run_held(*args: Any, **kwargs: Any) -> Any:
                # Activation checkpointing runs the forward again in the backward pass, where it was already counted.
                if self.counts_uses and torch._C._current_graph_task_id() == _NO_BACKWARD:  # noqa: SLF001
                    self._uses.update(block.groups)
                with self._residence.held(block.groups):
                    if not torch.is_grad_enabled():
                        with _without_copies():
                            return self._without_views(block, forward(*args, **kwargs))
                    thread = threading.get_ident()
                    outer = self._innermost.get(thread)
                    call = _BlockCall(self, block, outer)
                    given = {id(one): one._version for one in _differentiable((args, kwargs))}  # noqa: SLF001
                    try:
                        self._innermost[thread] = call
                        with _without_copies(), save_references(self._residence, block.groups, call.begin):
                            return call.watch_outputs(self._without_views(block, forward(*args, **kwargs)), given)
                    finally:
                        self._innermost[thread] = outer

            return run

        return wrap

    def _without_views(self, block: Block, output: Any) -> Any:
        """Copy the tensors in a block's result that view its weights: their memory is reused."""

        def is_view(leaf: Any) -> bool:
            address = None if isinstance(leaf, torch.nn.Parameter) else address_of(leaf)
            return address is not None and self._residence.find(block.groups, address) is not None

        return with_copies(output, is_view)

    def begin(self, call: _BlockCall) -> None:
        """Hold the groups of a block for its backward."""
        if id(call) in self._in_backward:
            return
        if not self._in_backward:
            # Ends the last block.
            end = _BackwardEnd(self)
            self._backward = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001
        else:
            # Autograd runs the operations of a block before those of earlier ones, so the others are done. A node on
            # their inputs would also tell. But it would add up their gradients before those from outside of the block.
            for other in [*self._in_backward.values()]:
                if not call.is_within(other):
                    self.end(other)
        # Recorded first: if an interrupt comes in between, `end_all` releases the groups.
        self._in_backward[id(call)] = call
        try:
            for group in call.block.groups:
                self._residence.hold(group, call)
        except BaseException:
            self._release(call)
            raise

    def end(self, call: _BlockCall) -> None:
        """Release the groups: all gradients of this call are done."""
        if not self._release(call):
            return
        self._uses.subtract(call.block.groups)
        for group in call.block.groups:
            if self._uses[group] <= 0:
                self._on_group_done(group)

    def end_all(self) -> None:
        """Release everything: the backward pass failed or will never come. Another thread's pass keeps its groups."""
        is_outside = self._residence.calls.get(threading.get_ident(), 0) == 0
        if is_outside:
            drop_stale_hooks()
        if self.is_in_backward_elsewhere():
            return
        for call in [*self._in_backward.values()]:
            self._release(call)
        if is_outside:
            self._residence.release_unheld()

    def end_failed(self) -> None:
        """Release the groups of an interrupted backward pass, unless one is running."""
        if torch._C._current_graph_task_id() == _NO_BACKWARD:  # noqa: SLF001
            self.end_all()

    def end_step(self) -> None:
        """Forget uses that got no gradients: they will get none."""
        self._uses.clear()

    def end_backward(self) -> None:
        """End the blocks that are still open: the backward pass is over."""
        for call in [*self._in_backward.values()]:
            self.end(call)

    def is_in_backward_elsewhere(self) -> bool:
        """Whether a backward pass is under way in another thread."""
        end = None if self._backward is None else self._backward()
        # The traceback of an interrupt may keep that of a pass of this thread alive.
        return end is not None and end.thread != threading.get_ident() and _is_outside_of_backward()

    def _release(self, call: _BlockCall) -> bool:
        if id(call) not in self._in_backward:
            return False
        self._residence.release(call)
        del self._in_backward[id(call)]
        return True


def _is_outside_of_backward() -> bool:
    return torch._C._current_graph_task_id() == _NO_BACKWARD  # noqa: SLF001


class _BackwardEnd:
    """Called at the end of a backward pass. Exists while the pass is under way."""

    def __init__(self, runner: BlockRunner) -> None:
        self._runner = runner
        self.thread = threading.get_ident()

    def __call__(self) -> None:
        self._runner.end_backward()


class _BlockCall(Holder):
    """One call of a block."""

    def __init__(self, passes: BlockRunner, block: Block, outer: _BlockCall | None) -> None:
        self._runner = passes
        self.block = block
        self._outer = outer

    def is_within(self, other: _BlockCall) -> bool:
        """Whether the other block made this call, directly or not."""
        outer = self._outer
        while outer is not None and outer is not other:
            outer = outer._outer  # noqa: SLF001
        return outer is not None

    def begin(self) -> None:
        self._runner.begin(self)

    def watch_outputs(self, output: Any, given: Mapping[int, int]) -> Any:
        """Detect the start of the backward: the gradient of an output comes first.

        Args:
            output: the result.
            given: the versions of the inputs, by ``id``. The gradient of one that is returned as it is comes last.
        """
        for tensor in _differentiable(output):
            if given.get(id(tensor)) != tensor._version:  # noqa: SLF001
                tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]
        return output

    def _begin(self, _gradient: torch.Tensor) -> None:
        self.begin()


def _differentiable(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results that get gradients."""
    for leaf in tree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_inference():
            yield leaf


def _without_copies() -> AbstractContextManager[Any]:
    """Disable autocast's cache of low-precision weights, which would end up containing all of them."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)
    return nullcontext()
