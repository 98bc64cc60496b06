"""The storages of a model and its optimizer: which tensors view them, and which of them only these tensors use.

A storage is freed when no tensor holds it. So its tensors give it up, refuse access, and view other memory later.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from deepnvme._checkpoint.load_memory import allocate
from deepnvme._modules.weight_classes import Placeholder
from deepnvme._utils.devices import engine_reaches
from deepnvme._utils.shards import is_dtensor, local
from deepnvme._utils.tensors import refuse_access

PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20
# Less than a page cannot be given back.
_BYTES_MIN = PAGE_BYTES
# Smaller storages share an allocation of this size.
_SLAB_BYTES = 16 << 20
_PLAIN = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))


@dataclass(eq=False)
class View:
    """A tensor, and how it views its storage."""

    tensor: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(tensor, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def point_at(self, storage: torch.UntypedStorage) -> None:
        """Let the tensor view another storage in the same way."""
        bare = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        self.tensor.data = bare.set_(storage, self.offset, self.shape, self.stride)

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
    # Whether a release has begun, and whether it is done. An interrupt may come in between.
    is_released: bool = False
    is_refused: bool = False
    # The memory that restoring has filled.
    filled: torch.Tensor | None = None

    def bytes_of(self) -> torch.Tensor:
        """View the storage as bytes."""
        storage = cast("torch.UntypedStorage", self.storage)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def release(self) -> None:
        """Take the memory from the tensors, so that it is freed, and let them refuse access."""
        self.is_released = True
        for view in self.views:
            refuse_access(
                view.tensor,
                f"{self.name} is on disk: deepnvme.spill has moved it there; call model.spilled.restore() first",
            )
        self.is_refused, self.storage = True, None

    def fill(self) -> None:
        """Let the tensors view the memory that was filled, unless they have got other data."""
        if self.filled is None:
            raise AssertionError
        for view in self.views:
            if not self.is_refused or view.is_without_memory():
                view.point_at(self.filled.untyped_storage())


def tensors_of(
    models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of models and an optimizer that hold memory, with a name for messages. Some come repeatedly."""
    for model in models:
        for name, param in model.named_parameters():
            yield from _with_gradient(name, param)
        for name, buffer in model.named_buffers():
            yield from _holders(name, buffer)
        for shard in _fsdp_shards(model):
            yield "a shard of FSDP", shard
    for group in [] if optimizer is None else optimizer.param_groups:
        for number, param in enumerate(group["params"]):
            yield from _with_gradient(f"parameter {number}", param)
    for state in [] if optimizer is None else optimizer.state.values():
        for name, value in _leaves("the optimizer's state", state):
            yield from _holders(name, value)


def _with_gradient(name: str, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _holders(name, param)
    if param.grad is not None:
        yield from _holders(f"the gradient of {name}", param.grad)


def _leaves(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(f"{key} of {name}", one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(name, one)


def _holders(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors that a tensor consists of."""
    if is_dtensor(tensor):
        yield from _holders(name, local(tensor))
    elif isinstance(tensor, Placeholder):
        return
    elif type(tensor) in _PLAIN:
        yield name, tensor
        base = tensor._base  # noqa: SLF001
        if base is not None:
            yield name, base
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


def movable_storages(named: Iterable[tuple[str, torch.Tensor]]) -> list[SpilledStorage]:
    """Collect the storages that can be moved: those that only these tensors use."""
    found: dict[int, SpilledStorage] = {}
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) in seen or not _is_movable(tensor):
            continue
        seen.add(id(tensor))
        storage = tensor.untyped_storage()
        one = found.get(storage._cdata)  # noqa: SLF001
        if one is None:
            one = SpilledStorage(name, storage.nbytes(), tensor.device, tensor.is_pinned(), storage)
            found[storage._cdata] = one  # noqa: SLF001
        one.views.append(View.of(tensor))
    return [one for one in found.values() if one.nbytes >= _BYTES_MIN and not _has_other_users(one)]


def _is_movable(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_inference():
        return False
    device = tensor.device
    if device.type == "cpu":
        # Other processes may map it.
        return not tensor.is_shared()  # type: ignore[no-untyped-call]
    return device.type == "cuda" and engine_reaches(device)


def _has_other_users(one: SpilledStorage) -> bool:
    # This object of Python counts as well.
    users: int = torch._C._storage_Use_Count(cast("torch.UntypedStorage", one.storage)._cdata)  # noqa: SLF001
    return users > len(one.views) + 1


def allocate_for(moved: Sequence[SpilledStorage]) -> list[torch.Tensor]:
    """Return memory for each storage, a tensor of bytes."""
    found: list[torch.Tensor] = []
    slab, at, begin = cast("Any", None), 0, 0
    for one in moved:
        if one.device.type != "cpu" or one.is_pinned:
            found.append(torch.empty(one.nbytes, dtype=torch.uint8, device=one.device, pin_memory=one.is_pinned))
            continue
        padded = -(-one.nbytes // PAGE_BYTES) * PAGE_BYTES
        if padded >= _SLAB_BYTES:
            memory, start = _huge(padded)
            found.append(torch.frombuffer(memory, dtype=torch.uint8, count=one.nbytes, offset=start))
            continue
        if slab is None or at + padded > _SLAB_BYTES:
            (slab, begin), at = _huge(_SLAB_BYTES), 0
        found.append(torch.frombuffer(slab, dtype=torch.uint8, count=one.nbytes, offset=begin + at))
        at += padded
    return found


def _huge(nbytes: int) -> tuple[Any, int]:
    """Allocate memory with huge pages, as far as it fills them. Faults of small pages cost more than the reads."""
    memory, start = allocate(nbytes)
    whole = nbytes // _HUGE_BYTES * _HUGE_BYTES
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory, start
