"""Group parameters that are moved together. Pure: names, sizes and structure only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._modules.partition import Limits, partition
from deepnvme._utils.tensors import is_dense, row_major

if TYPE_CHECKING:
    from collections.abc import Iterable

# Alignment of parameters within a group: good for vector loads, and enough for any dtype.
_ALIGNED_BYTES = 64
# Each group takes whole pages of the swapper's memory.
_PAGE_BYTES = 4096
# Modules are divided until each takes at most this fraction of the memory, if possible. One can then be in use while
# others are moved.
_GROUP_FRACTION = 1 / 4
# Modules whose parameters take at most this fraction of the memory, and at most so many bytes, stay in it, up to a
# total fraction.
_RESIDENT_FRACTION, _RESIDENT_BYTES_MAX, _ALL_RESIDENT_FRACTION = 1 / 1024, 1 << 16, 1 / 8


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter, and its position in its group."""

    parameter: nn.Parameter = field(repr=False)
    name: str
    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """View the parameter in the memory of its group, with its original strides."""
        flat = memory[self.offset : self.offset + self.nbytes].view(self.dtype)
        # `.data` is not a view to autograd.
        return flat.as_strided(self.shape, self.stride, flat.storage_offset()).data


@dataclass(eq=False)
class ParameterGroup:
    """Parameters that are moved together: used by the same blocks, and all trained or all frozen."""

    key: str
    is_frozen: bool
    members: list[Member] = field(default_factory=list)
    nbytes: int = 0

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Append a parameter."""
        offset = -(-self.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        # Gaps between elements are not kept.
        stride = parameter.stride() if is_dense(parameter) else row_major(parameter.shape)
        self.members.append(Member(parameter, name, offset, parameter.nbytes, parameter.shape, stride, parameter.dtype))
        self.nbytes = offset + parameter.nbytes


@dataclass
class Block:
    """A module, and the groups that are in memory while it runs."""

    name: str
    module: nn.Module = field(repr=False)
    groups: list[ParameterGroup]

    @property
    def nbytes(self) -> int:
        """Bytes that it needs to run: whole pages for each group."""
        return sum(-(-group.nbytes // _PAGE_BYTES) * _PAGE_BYTES for group in self.groups)


def find_misplaced(root: nn.Module, blocks: Iterable[Block]) -> tuple[str, str] | None:
    """Find a parameter in a module where it is not in memory: it was assigned there after it was offloaded.

    Returns:
        The name of that place, and the name that the parameter had. ``None``: each is in one of its blocks.
    """
    groups_of: dict[int, set[ParameterGroup]] = {}
    names: dict[int, tuple[ParameterGroup, str]] = {}
    for block in blocks:
        groups_of.setdefault(id(block.module), set()).update(block.groups)
        names.update((id(member.parameter), (group, member.name)) for group in block.groups for member in group.members)
    seen: set[tuple[int, frozenset[ParameterGroup]]] = set()

    def visit(module: nn.Module, prefix: str, held: frozenset[ParameterGroup]) -> tuple[str, str] | None:
        held |= groups_of.get(id(module), set())
        if (id(module), held) in seen:
            return None
        seen.add((id(module), held))
        for attribute, parameter in module._parameters.items():  # noqa: SLF001
            group, name = names.get(id(parameter), (None, ""))
            if group is not None and group not in held:
                return prefix + attribute, name
        below = (
            visit(child, f"{prefix}{name}.", held)
            for name, child in module._modules.items()  # noqa: SLF001
            if child is not None
        )
        return next(filter(None, below), None)

    return visit(root, "", frozenset())


def find_blocks(root: nn.Module, memory: int) -> list[Block]:
    """Find the blocks of a model, in module order.

    The parameters of small modules (at most 64 KiB and 1/1024 of the memory each, an eighth of it together), and those
    of modules outside of all blocks, stay in memory and belong to no group.

    Args:
        root: the model.
        memory: bytes for groups in memory.

    Raises:
        MemoryError: a block needs more than that.
    """
    blocks = partitioned(root, memory)
    lacking = find_shortage(root, blocks, memory)
    if lacking is not None:
        raise MemoryError(
            f"memory={memory} is too little: {lacking.name} alone needs {lacking.nbytes:,} bytes; "
            f"memory={lacking.enough} is enough, and with three times that, the next block can be loaded while one "
            "computes"
        )
    return blocks


@dataclass(frozen=True)
class Shortage:
    """The largest block, which exceeds the memory, and how much is enough."""

    name: str
    nbytes: int
    enough: int


def find_shortage(root: nn.Module, blocks: list[Block], memory: int) -> Shortage | None:
    """Return how much memory is enough for the largest block, if there is less."""
    largest = _largest(blocks)
    if largest is None or largest.nbytes <= memory:
        return None
    enough = largest.nbytes
    # With more memory, blocks may be larger.
    while (other := _largest(partitioned(root, enough))) is not None and other.nbytes > enough:
        enough = other.nbytes
    return Shortage(largest.name or f"the model itself ({type(root).__name__})", largest.nbytes, enough)


def _largest(blocks: list[Block]) -> Block | None:
    return max(blocks, key=lambda block: block.nbytes, default=None)


def partitioned(root: nn.Module, memory: int) -> list[Block]:
    """Find the blocks, even those that need more than the memory."""
    sizes = {id(parameter): parameter.nbytes for parameter in root.parameters() if parameter.nbytes > 0}
    limits = Limits(
        group_bytes_max=int(memory * _GROUP_FRACTION),
        resident_bytes_max=min(int(memory * _RESIDENT_FRACTION), _RESIDENT_BYTES_MAX),
        all_resident_bytes_max=int(memory * _ALL_RESIDENT_FRACTION),
        rows_bytes_min=None,
        experts_bytes_min=None,
    )
    found = partition(root, sizes, limits)
    layer_groups = found.groups
    # A parameter that a module outside of all blocks has as well is in memory all the time.
    resident = {id(getattr(weight.module, weight.attribute)) for weight in found.resident}
    users: dict[int, list[int]] = {}
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for index, layer_group in enumerate(layer_groups):
        for weight in layer_group.weights:
            parameter = getattr(weight.module, weight.attribute)
            if id(parameter) in resident:
                continue
            named.setdefault(id(parameter), (weight.name, parameter))
            if index not in users.setdefault(id(parameter), []):
                users[id(parameter)].append(index)
    groups: dict[tuple[tuple[int, ...], bool], ParameterGroup] = {}
    for parameter_id, used_by in users.items():
        name, parameter = named[parameter_id]
        kind = (tuple(used_by), not parameter.requires_grad)
        if kind not in groups:
            groups[kind] = ParameterGroup(f"group.{len(groups)}", is_frozen=kind[1])
        groups[kind].add(name, parameter)
    return [
        Block(
            layer_group.name, layer_group.module, [group for (used_by, _), group in groups.items() if index in used_by]
        )
        for index, layer_group in enumerate(layer_groups)
    ]
