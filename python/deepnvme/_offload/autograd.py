"""Save references to weights for the backward pass instead of their memory.

A linear layer saves its weight as a view into its slot. By the backward pass that slot contains another layer's
weights. So the saved object is the weight's position in its group, and unpacking views the slot that the group has
then. Under autocast the low-precision copy is made again instead of saved.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepnvme._offload.groups import Member, ParameterGroup
    from deepnvme._offload.residence import Residence

# Attribute of our hooks: how many blocks of their kind run in each thread.
_RUNNING = "_deepnvme_running"
# The autograd node of autocast's copy of a weight.
_COPY_NODE = "ToCopyBackward0"


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


@dataclass(frozen=True)
class _OuterSaved:
    """A tensor that is not a weight, packed by the surrounding hooks, and their unpack function."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor that is not a weight, at a version."""

    tensor: torch.Tensor
    version: int


def save_references(
    residence: Residence, groups: Sequence[ParameterGroup], ensure: Callable[[], None] | None
) -> AbstractContextManager[None]:
    """Save references into groups instead of their memory, for operations in the block.

    Args:
        residence: holds the groups.
        groups: the groups held while the block runs.
        ensure: called before a saved weight is used again; it holds all groups. ``None``: a copy of the weight is used.
    """
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
    members = {id(member.parameter): (group, member) for group in groups for member in group.members}

    def pack(tensor: torch.Tensor) -> Any:
        place = _weight_view(residence, groups, tensor) or _cast_view(residence, members, tensor)
        if place is not None:
            return place
        if around is not None:
            # For example those of activation checkpointing. Only the innermost hooks are called, so these pass all else
            # on.
            return _OuterSaved(around[0](tensor), around[1])
        return _SavedTensor(tensor, tensor._version)  # noqa: SLF001

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:  # noqa: SLF001
                raise RuntimeError(
                    "a tensor that the backward pass needs was changed in place after it was used "
                    f"(shape {tuple(saved.tensor.shape)})"
                )
            return saved.tensor
        if isinstance(saved, _OuterSaved):
            return saved.unpack(saved.packed)
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
    return _Hooks(pack, unpack)


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


class _Hooks(AbstractContextManager[None]):
    """Hooks for saved tensors, as ``torch.autograd.graph.saved_tensors_hooks``.

    torch's own stay if Ctrl-C comes between their entry and the block. And their exit removes the innermost hooks, even
    if those belong to another block by then.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack, self._unpack = pack, unpack

    def __enter__(self) -> None:
        try:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)  # noqa: SLF001
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
        if top is not None and top[0] is self._pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001


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
