"""The storages of a model and its optimizer: which tensors view them, and which of them only these tensors use.

A storage is freed when no tensor holds it. So its tensors give it up, refuse access, and view other memory later.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import nn

from deepnvme._modules.weight_classes import Placeholder
from deepnvme._utils.devices import engine_reaches
from deepnvme._utils.shards import is_dtensor, local
from deepnvme._utils.tensors import refuse_access
from deepnvme.errors import UnsupportedError

PAGE_BYTES = 4096
REMEDY = "deepnvme.spill has moved it there; call model.spilled.restore() first"
_HUGE_BYTES = 2 << 20
# Less than a page cannot be given back.
_BYTES_MIN = PAGE_BYTES
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_PLAIN = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))
# References that torch has to a tensor which is in Python, and to one that is also a gradient. A kernel that runs, a
# graph and a tensor of another library have more.
_REFERENCES, _REFERENCES_OF_GRADIENT = 1, 2


class Holder(NamedTuple):
    """A tensor that holds memory, its name for messages, and how many references torch may have to it."""

    name: str
    tensor: torch.Tensor
    references: int | None = _REFERENCES


@dataclass(eq=False)
class View:
    """A tensor, and how it views its storage."""

    tensor: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conjugate: bool
    is_negative: bool
    # Changes in place that were made before it was written.
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Look at a tensor."""
        return cls(
            tensor,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor._version,  # noqa: SLF001
        )

    def point_at(self, storage: torch.UntypedStorage) -> None:
        """Let the tensor view another storage in the same way."""
        view = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        view.set_(storage, self.offset, self.shape, self.stride)
        if self.is_conjugate:
            view = torch._conj(view)  # noqa: SLF001
        if self.is_negative:
            view = torch._neg_view(view)  # noqa: SLF001
        self.tensor.data = view

    def is_without_memory(self) -> bool:
        """Whether the tensor still refuses access."""
        try:
            self.tensor.untyped_storage()
        except RuntimeError:
            return True
        return False


@dataclass(eq=False)
class SpilledStorage:
    """A storage that is moved: where it is on disk, and the tensors that view it."""

    name: str
    nbytes: int
    device: torch.device
    is_pinned: bool
    storage: torch.UntypedStorage | None
    begin: int = 0
    views: list[View] = field(default_factory=list)
    is_movable: bool = True
    # Whether a release has begun, and whether it is done. An interrupt may come in between.
    is_released: bool = False
    is_refused: bool = False
    # The memory that restoring has filled.
    filled: torch.Tensor | None = None

    def bytes_of(self) -> torch.Tensor:
        """View the storage as bytes."""
        storage = cast("torch.UntypedStorage", self.storage)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def is_unchanged(self) -> bool:
        """Whether nobody has changed a tensor in place since it was looked at."""
        return all(view.tensor._version == view.version for view in self.views)  # noqa: SLF001

    def release(self) -> None:
        """Take the memory from the tensors, so that it is freed, and let them refuse access."""
        self.is_released = True
        for view in self.views:
            refuse_access(view.tensor, f"{self.name} is on disk: {REMEDY}")
        self.is_refused, self.storage = True, None

    def fill(self) -> None:
        """Let the tensors view the memory that was filled, unless they have got other data."""
        if self.filled is None:
            raise AssertionError
        for view in self.views:
            if not self.is_refused or view.is_without_memory():
                view.point_at(self.filled.untyped_storage())


def tensors_of(models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> Iterator[Holder]:
    """Yield all tensors of models and an optimizer that hold memory. Some come repeatedly."""
    for model in models:
        for name, param in model.named_parameters():
            yield from _with_gradient(name, param)
        for name, buffer in model.named_buffers():
            yield from _holders(name, buffer)
        for shard in _fsdp_shards(model):
            yield from _holders("a shard of FSDP", shard)
    for group in [] if optimizer is None else optimizer.param_groups:
        for number, param in enumerate(group["params"]):
            yield from _with_gradient(f"parameter {number}", param)
    for state in [] if optimizer is None else optimizer.state.values():
        for name, value in _leaves("the optimizer's state", state):
            yield from _holders(name, value)


def _with_gradient(name: str, param: torch.Tensor) -> Iterator[Holder]:
    yield from _holders(name, param)
    if param.grad is not None:
        yield from _holders(f"the gradient of {name}", param.grad, _REFERENCES_OF_GRADIENT)


def _leaves(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(f"{key} of {name}", one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(name, one)


def _holders(name: str, tensor: torch.Tensor, references: int = _REFERENCES) -> Iterator[Holder]:
    """Yield the plain tensors that a tensor consists of."""
    if is_dtensor(tensor):
        yield from _holders(name, local(tensor))
    elif isinstance(tensor, Placeholder):
        return
    elif type(tensor) in _PLAIN:
        yield Holder(name, tensor, references)
        base = tensor._base  # noqa: SLF001
        if base is not None:
            # Its views refer to it.
            yield Holder(name, base, None)
    elif hasattr(tensor, "__tensor_flatten__"):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _holders(f"{inner} of {name}", getattr(tensor, inner))


def _fsdp_shards(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of FSDP2 whose memory the sharded parameters view."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = None if state is None else getattr(state(), "_fsdp_param_group", None)
        for param in getattr(group, "fsdp_params", ()):
            data = getattr(param, "_sharded_param_data", None)
            if isinstance(data, torch.Tensor):
                yield data


def movable_storages(holders: Iterable[Holder]) -> tuple[list[SpilledStorage], int]:
    """Collect the storages that can be moved: those that only these tensors use. Return also the bytes of the others.

    Raises:
        UnsupportedError: a tensor is on disk already.
    """
    found: dict[int, SpilledStorage] = {}
    seen: set[int] = set()
    for holder in holders:
        tensor = holder.tensor
        if id(tensor) in seen or tensor.layout is not torch.strided or tensor.is_nested:
            continue
        seen.add(id(tensor))
        one = _storage_of(holder, found)
        one.views.append(View.of(tensor))
        one.is_movable = one.is_movable and _is_free(holder) and _is_ordinary(tensor)
    moved = [one for one in found.values() if one.is_movable and one.nbytes >= _BYTES_MIN and not _has_other_users(one)]
    return moved, sum(one.nbytes for one in found.values()) - sum(one.nbytes for one in moved)


def _storage_of(holder: Holder, found: dict[int, SpilledStorage]) -> SpilledStorage:
    try:
        storage = holder.tensor.untyped_storage()
    except RuntimeError as error:
        raise UnsupportedError(
            f"{holder.name} is on disk already: it belongs to a model that is spilled; call restore() of that first"
        ) from error
    if storage._cdata not in found:  # noqa: SLF001
        tensor = holder.tensor
        is_pinned = tensor.device.type == "cpu" and tensor.is_pinned()
        found[storage._cdata] = SpilledStorage(  # noqa: SLF001
            holder.name, storage.nbytes(), tensor.device, is_pinned, storage
        )
    return found[storage._cdata]  # noqa: SLF001


def _is_free(holder: Holder) -> bool:
    """Whether nothing but Python, and the parameter of a gradient, refers to a tensor."""
    return holder.references is None or holder.tensor._use_count() <= holder.references  # noqa: SLF001


def _is_ordinary(tensor: torch.Tensor) -> bool:
    if tensor.is_quantized or tensor.is_inference():
        return False
    device = tensor.device
    if device.type == "cpu":
        # Other processes may map it.
        return not tensor.is_shared()  # type: ignore[no-untyped-call]
    return device.type == "cuda" and engine_reaches(device)


def _has_other_users(one: SpilledStorage) -> bool:
    """Whether tensors that are not known, or the program itself, hold a storage."""
    # This object of Python counts as well.
    users: int = torch._C._storage_Use_Count(cast("torch.UntypedStorage", one.storage)._cdata)  # noqa: SLF001
    return users > len(one.views) + 1 or sys.getrefcount(one.storage) > _own_references()


def _own_references() -> int:
    """Return the references that Python counts to a storage which only a `SpilledStorage` holds."""
    tensor = torch.empty(1)
    probe = SpilledStorage("", 4, tensor.device, is_pinned=False, storage=tensor.untyped_storage())
    return sys.getrefcount(probe.storage)


def allocate_for(moved: Sequence[SpilledStorage]) -> list[torch.Tensor]:
    """Return memory for each storage, a tensor of bytes."""
    found = []
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    for one in moved:
        memory = torch.empty(one.nbytes, dtype=torch.uint8, device=one.device, pin_memory=one.is_pinned)
        found.append(memory)
        if one.device.type != "cpu" or one.is_pinned or advise is None:
            continue
        # Faults of small pages cost more than the reads.
        first = -(-memory.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
        whole = (memory.data_ptr() + one.nbytes - first) // _HUGE_BYTES * _HUGE_BYTES
        if whole > 0:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(whole), ctypes.c_int(_MADV_HUGEPAGE))
    return found
