"""The part of a parameter that this process has: all of it, or its shard of a DTensor.

The optimizers compute with, and keep state for, this part alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.tensor import DTensor

# A device mesh, and its dimensions over which a tensor is split.
SplitOver: TypeAlias = tuple[Any, tuple[int, ...]]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    # Importing torch.distributed.tensor takes long. If nobody imported it, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process has, without a copy."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: PLC0415

    shard = cast("DTensor", tensor)._local_tensor  # noqa: SLF001
    return shard.wait() if isinstance(shard, AsyncCollectiveTensor) else shard


def set_local(tensor: torch.Tensor, shard: torch.Tensor) -> None:
    """Replace the part of a DTensor that this process has."""
    cast("DTensor", tensor)._local_tensor = shard  # noqa: SLF001


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor. Communicates if it is a DTensor."""
    return cast("DTensor", tensor).full_tensor() if is_dtensor(tensor) else tensor


def split_as(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Split a tensor among processes as a parameter is. May communicate if it is a DTensor, and never otherwise."""
    if not is_dtensor(param):
        return tensor
    placed = cast("DTensor", param)
    if not is_dtensor(tensor):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

        return distribute_tensor(tensor, placed.device_mesh, placed.placements, src_data_rank=None)
    given = cast("DTensor", tensor)
    return tensor if given.placements == placed.placements else given.redistribute(placements=placed.placements)


def from_local(param: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a tensor like a parameter whose part in this process is ``shard``."""
    if not is_dtensor(param):
        return shard
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    placed = cast("DTensor", param)
    return DTensor.from_local(
        shard, placed.device_mesh, placed.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def first_element(param: torch.Tensor) -> int | None:
    """Return the index of this process's first element in the whole parameter, in memory order.

    ``None`` if its elements are no contiguous range of the whole.
    """
    if not is_dtensor(param) or not local(param).numel():
        return 0
    chunks = cast("Any", param).__create_chunk_list__()
    if len(chunks) != 1 or not param.is_contiguous():
        return None
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    # Dimensions up to the split one have one index, those behind it all.
    split = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    if sizes[split + 1 :] != tuple(param.shape[split + 1 :]):
        return None
    return sum(int(offset) * stride for offset, stride in zip(offsets, param.stride(), strict=True))


def noise_offset(param: torch.Tensor) -> int:
    """Return an index below ``param.numel()`` from which the local elements have indices that no other shard has."""
    first = first_element(param)
    if first is not None:
        return first
    placed, linear = cast("DTensor", param), 0
    coordinates: list[int] = list(placed.device_mesh.get_coordinate() or ())
    for dim in split_over(param)[1]:
        linear = linear * placed.device_mesh.size(dim) + coordinates[dim]
    count = local(param).numel()
    return min(linear * count, param.numel() - count)


def split_over(param: torch.Tensor) -> SplitOver:
    """Return the mesh dimensions over which a parameter is split; none for a whole one."""
    if not is_dtensor(param):
        return None, ()
    placed = cast("DTensor", param)
    # A strided shard is no `Shard` in all releases of torch.
    dims = [dim for dim, placement in enumerate(placed.placements) if not placement.is_replicate()]
    return placed.device_mesh, tuple(dims)


def total(parts: Iterable[tuple[SplitOver, float]]) -> float:
    """Add numbers of shards up over all processes. All processes give numbers of the same parameters."""
    import torch.distributed as dist  # noqa: PLC0415

    sums: dict[SplitOver, float] = {}
    for where, number in parts:
        sums[where] = sums.get(where, 0.0) + number
    found = 0.0
    for (mesh, dims), number in sums.items():
        reduced = torch.tensor(number, dtype=torch.float64)
        for dim in dims:
            dist.all_reduce(reduced, dist.ReduceOp.SUM, group=mesh.get_group(dim))
        found += reduced.item()
    return found
