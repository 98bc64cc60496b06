"""Run blocks: their groups are in memory during forward and backward, and autograd saves references between.

A linear layer saves its weight as a view into its slot. By the backward pass that slot contains another layer's
weights. So the saved object is the weight's position in its group, and unpacking views the slot that the group has
then. Under autocast the low-precision copy is made again instead of saved.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as tree

from deepnvme._modules.calls import refuse_recording, with_copies
from deepnvme._offload.residence import Holder
from deepnvme._offload.saved_tensors import KeptTensor, OuterTensor, SavedTensorHooks, keep, kept_tensor, outer_hooks
from deepnvme._utils.tensors import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deepnvme._offload.groups import Block, Member, ParameterGroup
    from deepnvme._offload.residence import Residence

# torch's graph task id outside of a backward pass.
_NO_BACKWARD = -1
# Attribute of our hooks: how many blocks of their kind run in each thread.
_RUNNING = "_deepnvme_running"
# The autograd node of autocast's copy of a weight.
_COPY_NODE = "ToCopyBackward0"


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


@dataclass(frozen=True)
class _WeightView:
    """A view of a group's bytes, at a version."""

    group: ParameterGroup
    version: int
    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _CastView:
    """A view of a copy in another dtype."""

    group: ParameterGroup
    version: int
    member: Member
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def save_references(
    residence: Residence, groups: Sequence[ParameterGroup], ensure: Callable[[], None] | None
) -> AbstractContextManager[object]:
    """Save references into groups instead of their memory, for operations in the block.

    Args:
        residence: holds the groups.
        groups: the groups held while the block runs.
        ensure: called before a saved weight is used again; it holds all groups. ``None``: a copy of the weight is used.
    """
    outer = outer_hooks()
    members = {id(member.parameter): (group, member) for group in groups for member in group.members}

    def pack(tensor: torch.Tensor) -> Any:
        place = _weight_view(residence, groups, tensor) or _cast_view(residence, members, tensor)
        if place is not None:
            return place
        return keep(tensor, outer)

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, KeptTensor | OuterTensor):
            return kept_tensor(saved)
        if residence.version(saved.group) != saved.version:
            raise RuntimeError(
                f"{saved.group.members[0].name} was changed after the forward pass, and the backward pass needs its "
                "old values; attach(..., in_backward=True) changes it in each backward pass"
            )
        if ensure is None:
            with residence.held([saved.group]):
                return _viewed(saved, residence.memory(saved.group)).clone(memory_format=torch.preserve_format)
        ensure()
        viewed = _viewed(saved, residence.memory(saved.group))
        # With `create_graph`, the backward pass is recorded itself, and what it saves outlives the slot.
        return viewed.clone(memory_format=torch.preserve_format) if torch.is_grad_enabled() else viewed

    setattr(pack, _RUNNING, residence.gathered_depths if ensure is None else residence.calls)
    return SavedTensorHooks(pack, unpack)


def drop_stale_hooks() -> None:
    """Remove hooks whose exit was interrupted in this thread: no block that they could belong to runs in it.

    They would keep groups in use.
    """
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:  # noqa: SLF001
        running: dict[int, int] | None = getattr(top[0], _RUNNING, None)
        if running is None or running.get(threading.get_ident(), 0):
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001


def _viewed(saved: _WeightView | _CastView, memory: torch.Tensor) -> torch.Tensor:
    if isinstance(saved, _WeightView):
        size = saved.dtype.itemsize
        flat = memory[saved.offset : saved.offset + (memory.numel() - saved.offset) // size * size].view(saved.dtype)
        return flat.as_strided(saved.size, saved.stride, flat.storage_offset()).data
    copy: torch.Tensor = saved.member.view(memory).to(saved.dtype)
    return copy.as_strided(saved.size, saved.stride, saved.offset)


def _weight_view(residence: Residence, groups: Sequence[ParameterGroup], tensor: torch.Tensor) -> _WeightView | None:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    found = residence.find(groups, tensor.data_ptr())
    if found is None:
        return None
    return _WeightView(found[0], residence.version(found[0]), found[1], tensor.dtype, tensor.size(), tensor.stride())


def _cast_view(
    residence: Residence, members: dict[int, tuple[ParameterGroup, Member]], tensor: torch.Tensor
) -> _CastView | None:
    base = tensor._base if tensor._is_view() else tensor  # noqa: SLF001
    node = base.grad_fn if base is not None else None
    if base is None or node is None or node.name() != _COPY_NODE:
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    found = members.get(id(leaf))
    if found is None or (base.shape, base.stride()) != (found[1].shape, found[1].stride):
        return None
    version = residence.version(found[0])
    return _CastView(
        found[0], version, found[1], tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
    )
