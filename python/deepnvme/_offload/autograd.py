"""What autograd keeps for the backward pass: of weights it keeps which they are, not their memory.

A linear layer saves its weight, as a view into the slot that it has in the forward pass. By the backward pass the slot
has the weights of another layer. So what is saved of a weight is its place in its group, and what comes back is the view
into the slot that the group has then. Under autocast the copy in the lower precision is made again instead of saved.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deepnvme._offload.groups import Member, ParameterGroup
    from deepnvme._offload.residence import Residence

# What autocast makes of a weight.
_COPY_NODE = "ToCopyBackward0"


@dataclass(frozen=True)
class _WeightView:
    """A view of bytes of a group, as they were."""

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
    """What is not a weight, as whoever is around this saves it, and how that comes back."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class _SavedTensor:
    """What is not a weight, and which version of it was saved."""

    tensor: torch.Tensor
    version: int


def save_references(
    residence: Residence, groups: Sequence[ParameterGroup], ensure: Callable[[], None]
) -> AbstractContextManager[None]:
    """Save places in groups instead of their memory, for what runs in the block.

    Args:
        residence: has the groups.
        groups: which are held while the block runs.
        ensure: is called when something saved is needed again: has all of them held.
    """
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
    members = {id(member.parameter): (group, member) for group in groups for member in group.members}

    def pack(tensor: torch.Tensor) -> Any:
        place = _weight_view(residence, groups, tensor) or _cast_view(residence, members, tensor)
        if place is not None:
            return place
        if around is not None:
            # Activation checkpointing, say: only the innermost hooks are called, so these pass on what is not theirs.
            return _OuterSaved(around[0](tensor), around[1])
        return _SavedTensor(tensor, tensor._version)  # noqa: SLF001

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:  # noqa: SLF001
                raise RuntimeError(
                    "a tensor that is needed for computing gradients was changed in place after it was used "
                    f"(shape {tuple(saved.tensor.shape)})"
                )
            return saved.tensor
        if isinstance(saved, _OuterSaved):
            return saved.unpack(saved.packed)
        if residence.version(saved.group) != saved.version:
            raise RuntimeError(
                f"{saved.group.members[0].name} was changed after the forward pass, and is needed for computing "
                "gradients; with attach(..., in_backward=True), that is so after each backward pass"
            )
        ensure()
        memory = residence.memory(saved.group)
        if isinstance(saved, _WeightView):
            size = saved.dtype.itemsize
            flat = memory[saved.offset : saved.offset + (memory.numel() - saved.offset) // size * size].view(
                saved.dtype
            )
            return flat.as_strided(saved.size, saved.stride, flat.storage_offset()).data
        copy: torch.Tensor = saved.member.view(memory).to(saved.dtype)
        return copy.as_strided(saved.size, saved.stride, saved.offset)

    return _hooks(pack, unpack)


@contextmanager
def _hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


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
