"""Partition a tree of modules into groups of weights that are loaded together. Pure."""

from __future__ import annotations

import dis
import inspect
import itertools
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

# Experts, rows, columns.
_MATRICES_NDIM = 3

# The use of an expert that was not loaded is only noticed for experts of two pages or more. Weights with smaller rows,
# such as biases and scales, stay in memory as long as they are few.
_EXPERT_BYTES_MIN = 2 * mmap.PAGESIZE
_SMALL_ROWS_FRACTION_MAX = 1 / 16


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, identified by its module and attribute."""

    module: nn.Module = field(repr=False)
    attribute: str
    name: str


@dataclass
class LayerGroup:
    """A module whose weights are loaded together before it runs."""

    name: str
    module: nn.Module = field(repr=False)
    weights: list[Weight] = field(repr=False)
    # Modules with exactly the same weights, such as an output layer that is tied to the embedding.
    aliases: list[LayerGroup] = field(default_factory=list, repr=False)


@dataclass
class RowLookup:
    """A module that uses rows of its weights by index: an embedding, or the experts of a layer."""

    name: str
    module: nn.Module = field(repr=False)
    weights: list[Weight] = field(repr=False)
    # Position and name of the argument of forward that contains the indices. `None` for an embedding, where torch's own
    # look-up has them.
    argument: tuple[int, str] | None


@dataclass
class Partition:
    """How a model is streamed."""

    groups: list[LayerGroup]
    lookups: list[RowLookup]
    # Small weights, and weights of modules that only contain others. They stay in memory.
    resident: list[Weight]

    def weights(self) -> list[Weight]:
        """List all weights, once for each module that has them."""
        return [*self.resident, *(weight for part in self._loaded() for weight in part.weights)]

    def modules(self) -> set[nn.Module]:
        """Return the modules whose weights are loaded when they run."""
        return {part.module for part in self._loaded()}

    def _loaded(self) -> list[LayerGroup | RowLookup]:
        groups = [member for group in self.groups for member in (group, *group.aliases)]
        return [*self.lookups, *groups]


@dataclass(frozen=True)
class Limits:
    """Size limits for the partition."""

    # Bytes of a group, unless a single module is larger.
    group_bytes_max: int
    # Weights up to this size are loaded once and stay, because a read of their own is not worth it.
    resident_bytes_max: int
    # Bytes of all weights that stay because they are small.
    all_resident_bytes_max: int
    # Embeddings below this size are loaded whole; `None`: all are.
    rows_bytes_min: int | None
    # If all experts of a layer together are below this size, they are loaded whole.
    experts_bytes_min: int | None


def partition(root: nn.Module, sizes: Mapping[int, int], limits: Limits) -> Partition:
    """Partition a model.

    Children of a ``ModuleList`` are blocks. Blocks up to the size limit are loaded whole, larger ones module by module.
    No architecture is known by name.

    Args:
        root: the model.
        sizes: bytes of each weight in memory, by ``id`` of the module's tensor.
        limits: size limits.

    Returns:
        The partition. A weight is listed once for each module that has it.
    """
    found = Partition([], [], [])
    _Partitioner(sizes, limits, found).walk(root)
    return found


def merge_tied(groups: Iterable[LayerGroup]) -> list[LayerGroup]:
    """Merge groups with exactly the same weights, so that none is in memory twice."""
    first: dict[tuple[int, ...], LayerGroup] = {}
    for group in groups:
        key = tuple(id(getattr(weight.module, weight.attribute)) for weight in group.weights)
        other = first.setdefault(key, group)
        if other is not group:
            other.aliases.append(group)
    return list(first.values())


# Modules of torch that hand the weights of their children to one kernel.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class _Partitioner:
    def __init__(self, sizes: Mapping[int, int], limits: Limits, found: Partition) -> None:
        self._sizes, self._limits, self._found = sizes, limits, found
        self._seen: set[int] = set()
        self._small_bytes = 0
        self._shared: set[int] = set()

    def walk(self, root: nn.Module) -> None:
        """Visit all modules."""
        parents: dict[int, set[int]] = {}
        for parent in root.modules():
            for child in parent.children():
                parents.setdefault(id(child), set()).add(id(parent))
        self._shared = {child for child, its in parents.items() if len(its) > 1}
        self.visit("", root, is_block=False)

    def visit(self, name: str, module: nn.Module, *, is_block: bool) -> None:
        # A module under two names, such as a shared embedding, is visited once.
        if id(module) in self._seen:
            return
        nbytes = self._bytes(module)
        if nbytes == 0:
            # Tensors without elements. They are read like others, since they may be on the meta device.
            self._found.resident += self._unseen(name, module)
            return
        if self._is_lookup(module):
            self._seen.add(id(module))
            self._add_lookup(name, module)
            return
        inside = [child for child in module.modules() if child is not module]
        is_whole = is_block or not any(isinstance(child, nn.ModuleList) for child in inside)
        # Weights that other modules use too form their own group.
        is_whole = is_whole and not any(self._is_lookup(child) or self._is_shared(child) for child in inside)
        # Large weights of the module itself are loaded when it runs. Its children join it, since it may use their
        # weights.
        is_owner = self._bytes_of_own(module) > self._limits.resident_bytes_max or isinstance(module, _FUSED)
        is_small = bool(name) and nbytes <= self._limits.group_bytes_max
        if has_forward(module) and (not inside or (is_whole and (is_small or is_owner))):
            self._take(name, module, nbytes)
            return
        self._seen.add(id(module))
        self._found.resident += self._own(name, module)
        for child_name, child in module.named_children():
            self.visit(
                f"{name}.{child_name}".lstrip("."), child, is_block=is_block or isinstance(module, nn.ModuleList)
            )

    def _take(self, name: str, module: nn.Module, nbytes: int) -> None:
        weights = self._unseen(name, module)
        if (
            nbytes <= self._limits.resident_bytes_max
            and self._small_bytes + nbytes <= self._limits.all_resident_bytes_max
        ):
            self._small_bytes += nbytes
            self._found.resident += weights
        else:
            self._found.groups.append(LayerGroup(name, module, weights))

    def _unseen(self, name: str, module: nn.Module) -> list[Weight]:
        """List the weights of a module and those below it that were not visited yet."""
        weights: list[Weight] = []
        for path, child in module.named_modules(prefix=name):
            if id(child) not in self._seen:
                self._seen.add(id(child))
                weights += self._own(path, child)
        return weights

    def _own(self, name: str, module: nn.Module) -> Iterator[Weight]:
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None and id(tensor) in self._sizes:
                yield Weight(module, attribute, f"{name}.{attribute}".lstrip("."))

    def _bytes(self, module: nn.Module) -> int:
        tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        return sum(self._sizes.get(tensor, 0) for tensor in tensors)

    def _is_lookup(self, module: nn.Module) -> bool:
        if isinstance(module, nn.Embedding):
            nbytes = self._sizes.get(id(module.weight), 0)
            is_large = self._limits.rows_bytes_min is not None and nbytes >= max(self._limits.rows_bytes_min, 1)
            return is_large and only_looks_rows_up(module)
        own = self._bytes_of_own(module)
        is_large = self._limits.experts_bytes_min is not None and own >= max(self._limits.experts_bytes_min, 1)
        if not is_large or own != self._bytes(module) or experts_argument(module) is None:
            return False
        if not is_known(module):
            return False
        small = [tensor for tensor in own_tensors(module) if not self._has_large_rows(tensor)]
        return sum(self._sizes.get(id(tensor), 0) for tensor in small) <= own * _SMALL_ROWS_FRACTION_MAX

    def _has_large_rows(self, tensor: torch.Tensor) -> bool:
        return tensor.ndim > 0 and self._sizes.get(id(tensor), 0) >= _EXPERT_BYTES_MIN * tensor.shape[0]

    def _add_lookup(self, name: str, module: nn.Module) -> None:
        own = list(self._own(name, module))
        if not isinstance(module, nn.Embedding):
            rows = [weight for weight in own if self._has_large_rows(getattr(module, weight.attribute))]
            self._found.lookups.append(RowLookup(name, module, rows, experts_argument(module)))
            self._found.resident += [weight for weight in own if weight not in rows]
            return
        rows = [weight for weight in own if weight.attribute == "weight"]
        self._found.lookups.append(RowLookup(name, module, rows, None))
        self._found.resident += [weight for weight in own if weight.attribute != "weight"]
        for child_name, child in module.named_children():
            self.visit(f"{name}.{child_name}".lstrip("."), child, is_block=False)

    def _is_shared(self, module: nn.Module) -> bool:
        return id(module) in self._shared and self._bytes(module) > 0

    def _bytes_of_own(self, module: nn.Module) -> int:
        own = {id(tensor) for tensor in own_tensors(module)}
        return sum(self._sizes.get(tensor, 0) for tensor in own)


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """List the parameters and buffers of a module, without those of its children."""
    own = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
    return [tensor for tensor in own if tensor is not None]


def only_looks_rows_up(module: nn.Embedding) -> bool:
    """Whether an embedding uses its weight for nothing but look-ups of rows.

    Many models scale or normalise the result of ``super().forward(ids)`` in a class of their own. The code of such a
    class is read, since it cannot be run without the weight. Whatever is not understood may use the weight.
    """
    if module.max_norm is not None or "forward" in vars(module):
        return False
    for kind in type(module).__mro__:
        if kind is nn.Embedding:
            return True
        forward = vars(kind).get("forward")
        if "__getattr__" in vars(kind) or (forward is not None and not _only_calls_super(module, forward)):
            return False
    return False


# Attributes of a weight that are no values.
_WITHOUT_VALUES = frozenset(("dtype", "device", "shape"))
# Methods of tensors that are also attributes of modules.
_OF_TENSORS = frozenset(("to", "type", "float", "half", "bfloat16"))
_LOADS_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def _only_calls_super(module: nn.Module, forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    if code is None or hasattr(forward, "__wrapped__") or any(inspect.iscode(const) for const in code.co_consts):
        return False
    itself = code.co_varnames[0] if code.co_argcount else None
    loads = [each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_")]
    has_super = False
    for load, following in itertools.pairwise([*loads, None]):
        assert load is not None
        reads = following is not None and following.opname.startswith(_LOADS_OF_ATTRIBUTES)
        if load.opname.startswith(_LOADS_OF_ATTRIBUTES):
            if load.argval == "weight":
                if not reads or following is None or following.argval not in _WITHOUT_VALUES:
                    return False
            elif load.argval == "forward":
                has_super = True
            elif load.argval not in _OF_TENSORS and not _is_value(module, load.argval):
                return False
        elif itself in (names := _names(load)) and not (names[-1] == itself and reads):
            # The module goes elsewhere.
            return False
        elif load.opname.startswith("LOAD_GLOBAL") and load.argval in {"getattr", "vars", "locals"}:
            return False
    return has_super


def _names(load: dis.Instruction) -> tuple[Any, ...]:
    # Some instructions load two variables.
    return load.argval if isinstance(load.argval, tuple) else (load.argval,)


def _is_value(module: nn.Module, name: str) -> bool:
    """Whether an attribute is no code of the module's class, and none that was assigned to it."""
    own = vars(module).get(name)
    is_own_code = callable(own) and not isinstance(own, (nn.Module, type))
    return not is_own_code and not hasattr(type(module), name)


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own, unlike a plain container."""
    return type(module).forward is not nn.Module.forward


def is_known(module: nn.Module) -> bool:
    """Whether a module that looks like experts is one of transformers, whose code uses the selected ones only.

    The code of others may use any expert, also in ways that nobody would notice.
    """
    forward = type(module).forward
    codes = (type(module).__module__, getattr(forward, "__module__", ""))
    return "forward" not in vars(module) and all(code.startswith("transformers.models.") for code in codes)


def experts_argument(module: nn.Module) -> tuple[int, str] | None:
    """Find the argument of forward that selects experts, if the module contains all experts of a layer.

    All weights of such a module have the same first dimension, and an argument's name contains "index" or "indices".
    """
    own = own_tensors(module)
    has_matrices = any(tensor.ndim == _MATRICES_NDIM for tensor in own)
    if not has_matrices or len({tensor.shape[:1] for tensor in own}) > 1 or own[0].shape[0] == 1:
        return None
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for position, name in enumerate(names):
        if "index" in name or "indices" in name:
            return position, name
    return None
