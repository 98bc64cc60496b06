"""The serialised state of one rank: whether all ranks have the same, and which values the leader provides.

Each rank writes a byte range of the file out of its own memory, so names and sizes must agree. They are compared. The
leader provides non-tensor values, which are in its pickle, and small tensors. Both commonly differ between ranks, as
random-number states and batch statistics do, and a small tensor has a single checksum (see `_SMALL_BYTES`).
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme._checkpoint.nested_states import named_tensors
from deepnvme._checkpoint.pickler import pickle_with_storages
from deepnvme._checkpoint.save import NamedTensor, SaveOptions, checked_tensors, plan_archive, plan_safetensors
from deepnvme._utils.tensors import contiguous_exactly

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme._checkpoint.distributed.process_group import RankGroup
    from deepnvme._deepnvme import _SavePlan

# A tensor below this size has a single checksum, which two ranks with a half each could not compute. `LARGE_BYTES` in
# deepnvme-format is the same limit.
_SMALL_BYTES = 256 << 10

# A tensor's name, and everything about it except its elements.
_Description = tuple[str, str]


@dataclass
class SerialisedState:
    """A state taken apart, from which a file is planned."""

    descriptions: list[_Description]
    pickle: bytes | None = None
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    tensors: list[NamedTensor] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A hash that is equal if the tensors agree in names, sizes and layout."""
        return hashlib.sha256(repr(self.descriptions).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        if self.pickle is None:
            return sum(int(getattr(tensor, "nbytes", 0)) for _, tensor in self.tensors)
        return sum(storage.nbytes() for storage in self.storages)

    def take_from_leader(self, group: RankGroup) -> None:
        """Replace this rank's pickle and small tensors with those of the leader, rank 0."""
        own = [self._small_bytes(index) for index in range(max(len(self.storages), len(self.tensors)))]
        self.pickle, leaders_small = group.broadcast((self.pickle, own))
        if group.is_leader:
            return
        for index, nbytes in enumerate(leaders_small):
            if nbytes is None:
                continue
            flat = torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)
            if self.storages:
                self.storages[index] = flat.untyped_storage()
            else:
                name, tensor = self.tensors[index]
                self.tensors[index] = (name, flat.view(tensor.dtype).view(tensor.shape))

    def _small_bytes(self, index: int) -> bytes | None:
        if self.storages:
            storage = self.storages[index]
            nbytes = storage.nbytes()
            if not 0 < nbytes < _SMALL_BYTES:
                return None
            held: Any = storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
        else:
            tensor = self.tensors[index][1]
            nbytes = tensor.nbytes
            if not 0 < nbytes < _SMALL_BYTES:
                return None
            held = contiguous_exactly(tensor.resolve_conj().resolve_neg()).cpu()
        return ctypes.string_at(held.data_ptr(), nbytes)

    def plan(self, path: Path, options: SaveOptions) -> _SavePlan:
        """Plan the file."""
        if self.pickle is None:
            return plan_safetensors(path, self.tensors, options)
        return plan_archive(self.pickle, self.storages, path, options)


def serialise(obj: object, is_archive: bool) -> SerialisedState:
    """Take a state apart."""
    if not is_archive:
        tensors = checked_tensors(obj)
        descriptions = [(name, f"{tensor.dtype} {list(tensor.shape)}") for name, tensor in tensors]
        return SerialisedState(descriptions, tensors=tensors)
    pickle, storages = pickle_with_storages(obj, warns=True)
    descriptions, is_all = _descriptions(obj, storages)
    if not is_all:
        # Tensors inside objects have no name. If the pickles are equal, so is the order of storages.
        descriptions.append(("objects outside of dicts and lists", hashlib.sha256(pickle).hexdigest()[:16]))
    return SerialisedState(descriptions, pickle, list(storages))


def _descriptions(obj: object, storages: list[torch.UntypedStorage]) -> tuple[list[_Description], bool]:
    """Describe all tensors that have names. Returns whether these are all."""
    places = {_storage_key(storage): index for index, storage in enumerate(storages) if storage.nbytes()}
    seen: set[int | None] = set()
    descriptions = []
    for name, tensor in named_tensors(obj):
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            index = places.get(_storage_key(storage))
            seen.add(index)
            view = f"offset {tensor.storage_offset()}, strides {list(tensor.stride())}"
            what += f" ({view}, in storage {index} of {storage.nbytes()} bytes)"
        descriptions.append((name, what))
    return descriptions, seen >= set(places.values())


def _storage_key(storage: torch.UntypedStorage) -> tuple[str, int, int]:
    return str(storage.device), storage.data_ptr(), storage.nbytes()


def raise_different(group: RankGroup, what: str, state: SerialisedState) -> NoReturn:
    """Raise on all ranks that the states differ, and say where."""
    leaders = group.broadcast(state.descriptions)
    own = next((pair for pair in zip_longest(leaders, state.descriptions) if pair[0] != pair[1]), None)
    differing = [(rank, pair) for rank, pair in enumerate(group.all_gather(own)) if pair is not None]
    rank, (expected, found) = differing[0]
    ranks = ", ".join(str(rank) for rank, _ in differing)
    text = _difference(rank, found, expected)
    advice = "all ranks must save the same tensors in the same order"
    who = f"the state of rank {ranks} differs" if len(differing) == 1 else f"the states of ranks {ranks} differ"
    group.raise_on_all(f"{what}: {who} from that of rank 0: {text}; {advice}")


def _difference(rank: int, found: _Description | None, expected: _Description | None) -> str:
    if found is None or expected is None or found[0] != expected[0]:
        # Two different names say all; the rest would hide them.
        return f"rank {rank} has {_shown(found)} where rank 0 has {_shown(expected)}"
    return f"{found[0]!r} is {found[1]} on rank {rank}, and {expected[1]} on rank 0"


def _shown(line: _Description | None) -> str:
    return "nothing more" if line is None else repr(line[0])
