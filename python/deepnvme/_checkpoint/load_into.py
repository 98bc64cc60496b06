"""``deepnvme.load(into=...)``: fill existing tensors, refuse those that share memory, and replace other values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from deepnvme._checkpoint.load_memory import allocate
from deepnvme._checkpoint.load_request import StorageEntry, storage_entries, tensor_entries
from deepnvme._checkpoint.nested_states import (
    Replacements,
    empty_containers,
    has_name,
    has_values,
    name_of,
    named_tensors,
    refuse_lost,
    tensor_expressions,
    tensor_keys,
)
from deepnvme._deepnvme import _PlainTargets
from deepnvme._utils.devices import engine_reaches, relaxed_capture_for
from deepnvme._utils.public import first_of, warn_caller
from deepnvme._utils.tensors import cast_refusal, copy_exactly, find_copy, without_gradients
from deepnvme.errors import InvalidArgumentError, MovedError

if TYPE_CHECKING:
    from deepnvme._checkpoint.load_request import LoadRequest, SourceFile
    from deepnvme._checkpoint.nested_states import Keys
    from deepnvme._deepnvme import _CheckpointReader, _DirectReads

# Tensors that cannot be filled directly go through temporary buffers, one group of storages after the other. A group
# has at most this size, or is a single larger storage.
_GROUP_BYTES = 64 << 20


def fill(request: LoadRequest, into: Any, cast: bool) -> Any:
    """Fill each tensor of ``into`` with the tensor of its name."""
    targets = _targets(request, into)
    if found := find_copy(targets):
        name, remedy = found
        msg = f"{request.name}: {name} of into is a copy, and filling it would load nothing"
        raise InvalidArgumentError(f"{msg}; load without into, then call {remedy}")
    # Most states are flat dicts of tensors.
    is_flat = bool(into) and isinstance(into, Mapping) and targets.keys() == into.keys()
    empty = [] if is_flat else empty_containers(into)
    wants_values = not is_flat and (bool(empty) or has_values(into))
    wanted = _Wanted(targets, empty, into if wants_values else None, cast)
    if (new := request.for_files(lambda files: _fill_all(request, files, wanted))) is None:
        return into
    new.apply()
    for kept, why in ((new.lacking, "the file has no value for"), (new.fixed, "a tuple cannot be changed:")):
        if kept:
            warn_caller(f"{request.name}: {why} {first_of([*map(name_of, kept)])}; into keeps its own")
    return into


class TargetOverlaps:
    """The targets of a load. Call ``check`` once all are known, before the first byte changes."""

    def __init__(self, plain: _PlainTargets | None = None) -> None:
        self._plain = _PlainTargets({}) if plain is None else plain
        self._sources: dict[Any, Any] = {}
        self._views: list[tuple[str, int, list[int], list[int], int]] = []

    def add(self, name: str, target: torch.Tensor, source: Any) -> Any:
        """Add a target. Returns the source of an earlier target that is the same view, or ``None``."""
        view = (target.device, target.data_ptr(), target.dtype, target.shape, target.stride())
        if (earlier := self._sources.setdefault(view, source)) is not source:
            return earlier
        itemsize = target.element_size()
        strides = [stride * itemsize for stride in target.stride()]
        self._views.append((name, target.data_ptr(), list(target.shape), strides, itemsize))
        return None

    def check(self, file: str) -> None:
        """Refuse targets that share a part of their memory: one would overwrite what another was filled with."""
        shared = self._plain.first_shared(self._views) if self._views else None
        if shared is None:
            return
        one, other = sorted(shared)
        if one == other:
            msg = f"{file}: {one} has elements that share their memory (expand() and as_strided() make such tensors)"
            raise InvalidArgumentError(f"{msg}; fill a tensor of its own, such as {one}.contiguous()")
        msg = f"{file}: {one} and {other} share a part of their memory, and cannot both be filled"
        raise InvalidArgumentError(f"{msg}; give each a tensor of its own")


def compare(what: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Refuse a source that differs from the bytes that an earlier source has put into the same target.

    NaN equals itself.
    """
    target = target.detach()
    with relaxed_capture_for(target.device):
        expected, found = copy_exactly(torch.empty_like(target, device="cpu"), source), target.cpu()
    first, second = (
        tensor.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in (found, expected)
    )
    if not torch.equal(first, second):
        msg = f"{what} shares its memory with another tensor, and the file has different values for the two; give each"
        raise InvalidArgumentError(f"{msg} a tensor of its own (the memory now holds the other tensor's values)")


class _Wanted(NamedTuple):
    """What a load is to find in the files."""

    targets: dict[str, torch.Tensor]
    empty: list[Keys]
    """Empty containers."""
    values_of: Any
    """A state whose non-tensor values are replaced; ``None`` if it has none."""
    cast: bool


class _Stored(NamedTuple):
    """A tensor of the file, and what a lazy conjugate or negative needs."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    storage_offset: int
    storage: int
    signs: tuple[bool, bool] | None
    """Whether it is conjugate, and whether negative. ``None``: neither."""


# The name of a target, the target, and the tensor that fills it.
_Pair = tuple[str, torch.Tensor, _Stored]


class _Plan(NamedTuple):
    """The targets that one file fills."""

    reader: _CheckpointReader
    plain: _DirectReads
    """Filled by the read itself, and found by the extension."""
    direct: list[Any]
    """Filled by the read itself, and found here."""
    copied: list[_Pair]
    """Filled by a copy from a temporary buffer."""
    compared: list[_Pair]
    """Filled under an earlier name already; the tensor of this name must be the same."""


def _fill_all(request: LoadRequest, files: list[SourceFile], wanted: _Wanted) -> Replacements | None:
    """Fill the tensors, and find the other values if there are any."""
    try:
        return _fill_from(request, files, wanted, headers="trust")
    except MovedError:
        # Another program placed the records differently than the directory suggests. Fill again below: in this block,
        # the error would keep the memory of the first time.
        pass
    return _fill_from(request, files, wanted, headers="read")


def _fill_from(
    request: LoadRequest, files: list[SourceFile], wanted: _Wanted, *, headers: Literal["trust", "read"]
) -> Replacements | None:
    plans = _plan(request, files, wanted.targets, wanted.cast, headers=headers)
    new = None
    if wanted.values_of is not None:
        is_archive = len(plans) == 1 and plans[0].reader.format != "safetensors"
        saved = request.build_on_meta(plans[0].reader, files[0].path) if is_archive else {}
        new = Replacements(wanted.values_of, saved)
        names = (entry.name for plan in plans for entry in tensor_entries(plan.reader))
        refuse_lost(request.name, wanted.empty, new.lacking, names)
    _fill(request, plans)
    return new


def _fill(request: LoadRequest, plans: list[_Plan]) -> None:
    for plan in plans:
        if len(plan.plain):
            plan.reader.start_direct(plan.plain).finish(request.verify, request.report)
        if plan.direct:
            plan.reader.start(plan.direct).finish(request.verify, request.report)
        if plan.copied or plan.compared:
            storages = storage_entries(plan.reader)
            _read_groups(request, plan.reader, plan.copied, storages, _copy)
            _read_groups(request, plan.reader, plan.compared, storages, compare)


def _plan(
    request: LoadRequest,
    files: list[SourceFile],
    targets: dict[str, torch.Tensor],
    cast: bool,
    *,
    headers: Literal["trust", "read"],
) -> list[_Plan]:
    """Find each tensor in the files, before the first byte changes. Refuse targets that do not fit."""
    plans = []
    # A tensor of a flat state dict is named by its key, even if the key contains dots.
    missing = set(targets)
    plain = _PlainTargets(targets)
    overlaps = TargetOverlaps(plain)
    for file in files:
        reader = request.open(file, headers=headers)
        reads, rest = reader.direct_reads(plain, missing, file.names)
        plan = _Plan(reader, reads, [], [], [])
        plans.append(plan)
        if not rest:
            continue
        storages = storage_entries(reader)
        signs = {number: (is_conj, is_neg) for number, is_conj, is_neg in reader.signs()}
        for number, entry in zip(rest, tensor_entries(reader, rest), strict=True):
            name = entry.name
            if name not in missing:
                msg = f"{request.name}: the file contains two tensors called {name!r}, so the name is ambiguous"
                raise InvalidArgumentError(f"{msg}; load without into, and copy the tensors")
            missing.discard(name)
            target, dtype = targets[name], getattr(torch, entry.dtype)
            _check_kind(f"{request.name}: {name}", target)
            _check(f"{request.name}: {name}", target, dtype, entry.shape, cast)
            stored = _Stored(dtype, *entry[2:], signs.get(number))
            source = (file, stored)
            if not target.numel():
                continue
            if earlier := overlaps.add(name, target, source):
                # Tied weights: once is enough if the file has them tied as well.
                if earlier != source:
                    plan.compared.append((name, target, stored))
            elif _is_direct(target, stored, storages[stored.storage].nbytes):
                buffer = (storages[stored.storage].offset, target.nbytes, [(stored.storage, 0)])
                plan.direct.append((buffer, target.detach()))
            else:
                _check_writable(f"{request.name}: {name}", target)
                plan.copied.append((name, target, stored))
    if missing:
        there = [entry.name for plan in plans for entry in tensor_entries(plan.reader) if entry.name not in targets]
        shown = first_of(sorted(missing))
        msg = (
            f"{request.name}: the file contains no dense tensor called {shown}; leave it out of into, or check the name"
        )
        raise KeyError(f"{msg} (the file also contains {first_of(there)})" if there else msg)
    overlaps.check(request.name)
    return plans


def _targets(request: LoadRequest, into: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors by name. Each name must be unique."""
    if _is_flat(into):
        return dict(into)
    found = list(named_tensors(into))
    targets = dict(found)
    if odd := next((key for key in tensor_keys(into) if not has_name(key)), None):
        msg = f"{request.name}: the key {odd!r} of into has no name in a file: it is neither text nor a whole number"
        raise InvalidArgumentError(f"{msg}; load without into, and copy the tensors")
    if not targets and into:
        msg = f"{request.name}: into has no tensor to fill"
        raise InvalidArgumentError(msg)
    if len(targets) < len(found):
        counts = Counter(name for name, _ in found)
        twice = next(name for name, count in counts.items() if count > 1)
        ways = [way for (name, _), (way, _) in zip(found, tensor_expressions(into), strict=True) if name == twice]
        msg = f"{request.name}: into has {' and '.join(ways)}, both called {twice!r} in a file; fill them one by one"
        raise InvalidArgumentError(msg)
    return targets


def _is_flat(into: Mapping[str, Any]) -> bool:
    """Return whether it is a dict of tensors by names that need no change, as most state dicts are."""
    return (
        bool(into)
        and type(into) in (dict, OrderedDict)
        and all(type(key) is str and key.isascii() and isinstance(value, torch.Tensor) for key, value in into.items())
    )


def _check_kind(what: str, target: torch.Tensor) -> None:
    """Refuse a tensor that has no memory of its own for each element."""
    if target.is_meta:
        kind, remedy = "is on the meta device", "give it memory first, with module.to_empty(device=...)"
    elif target.layout is not torch.strided or target.is_nested:
        kind, remedy = "is not a dense tensor", "load the file without into, and assign the tensor"
    elif target.numel() and not target.data_ptr():
        kind, remedy = "has no memory (the weights of a streamed model have none)", "load the file without into"
    elif target.is_quantized:
        kind, remedy = "is quantised", "load the file without into, and assign the tensor"
    elif target.numel() and 0 in {
        stride for size, stride in zip(target.shape, target.stride(), strict=True) if size > 1
    }:
        kind, remedy = "has elements that share their memory (expand)", "fill a tensor of its own, and expand that"
    else:
        return
    msg = f"{what} {kind} in into, and cannot be filled; {remedy}"
    raise InvalidArgumentError(msg)


def _check(what: str, target: torch.Tensor, dtype: torch.dtype, shape: list[int], cast: bool) -> None:
    if list(target.shape) != shape:
        msg = f"{what} has the shape {shape} in the file, and {list(target.shape)} in into"
        raise InvalidArgumentError(f"{msg}; make the model of the file, or leave it out of into")
    if target.dtype != dtype and not cast:
        msg = f"{what} is {dtype} in the file, and {target.dtype} in into; cast=True converts it"
        raise TypeError(msg)
    if refusal := cast_refusal(dtype, target.dtype):
        msg = f"{what} is {dtype} in the file, and {target.dtype} in into, {refusal}"
        raise InvalidArgumentError(f"{msg}; fill a tensor of {dtype}, or load without into and convert the tensor")


def _check_writable(what: str, target: torch.Tensor) -> None:
    if target.is_inference() and not torch.is_inference_mode_enabled():
        msg = f"{what} is an inference tensor of another dtype or layout than in the file; fill it within"
        raise InvalidArgumentError(f"{msg} torch.inference_mode(), or a clone of it")


def _is_direct(target: torch.Tensor, stored: _Stored, storage_bytes: int) -> bool:
    """Return whether the target needs exactly the bytes of one storage of the file, in their order."""
    expected = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    is_plain = (
        stored.signs is None
        and target.layout is torch.strided
        and target.is_contiguous()
        and engine_reaches(target.device)
        and not (target.is_conj() or target.is_neg())
    )
    return is_plain and target.dtype == stored.dtype and stored.storage_offset == 0 and target.nbytes == storage_bytes


def _read_groups(
    request: LoadRequest,
    reader: Any,
    waiting: list[_Pair],
    storages: list[StorageEntry],
    use: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    """Read whole storages into temporary buffers, group by group. `use` gets what is to be filled, and the source."""
    # Tensors of one storage follow each other, so each storage is read once.
    waiting = sorted(waiting, key=lambda pair: pair[2].storage, reverse=True)
    while waiting:
        group: list[_Pair] = []
        group_bytes, last = 0, None
        while waiting:
            index = waiting[-1][2].storage
            more = 0 if index == last else storages[index].nbytes
            if group and more and group_bytes + more > _GROUP_BYTES:
                break
            group.append(waiting.pop())
            group_bytes, last = group_bytes + more, index
        # In a call of its own: it lets go of the buffers before the next group gets some.
        _read_group(request, reader, group, storages, use)


def _read_group(
    request: LoadRequest,
    reader: Any,
    group: list[_Pair],
    storages: list[StorageEntry],
    use: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    flats: dict[int, Any] = {}
    buffers = []
    for _, _, stored in group:
        index, entry = stored.storage, storages[stored.storage]
        if entry.nbytes and index not in flats:
            memory, start = allocate(entry.nbytes)
            view = memoryview(memory)[start : start + entry.nbytes]
            flats[index] = torch.frombuffer(view, dtype=torch.uint8)
            buffers.append(((entry.offset, entry.nbytes, [(index, 0)]), view))
    if buffers:
        reader.start(buffers).finish(request.verify, request.report)
    for name, target, stored in group:
        storage = flats[stored.storage].untyped_storage()
        source = torch.empty(0, dtype=stored.dtype).set_(storage, stored.storage_offset, stored.shape, stored.strides)
        is_conj, is_neg = stored.signs or (False, False)
        source = source.conj() if is_conj else source
        source = torch._neg_view(source) if is_neg else source  # noqa: SLF001
        use(f"{request.name}: {name}", target, source)


def _copy(_what: str, target: torch.Tensor, source: torch.Tensor) -> None:
    with relaxed_capture_for(target.device):
        without_gradients(copy_exactly, target, source)
