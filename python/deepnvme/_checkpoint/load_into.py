"""``deepnvme.load(into=...)``: fill existing tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._checkpoint.allocation import allocate
from deepnvme._checkpoint.filled_memory import FilledMemory, compare
from deepnvme._checkpoint.tensor_names import has_name, named_tensors, tensor_expressions, tensor_keys
from deepnvme._utils.tensors import engine_reaches
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from deepnvme._checkpoint.load_request import LoadRequest, SourceFile
    from deepnvme._deepnvme import _CheckpointReader

# Tensors that cannot be filled directly go through a temporary buffer of this size, one group after the other.
_GROUP_BYTES = 64 << 20
# Index of the storage number in the description of a tensor.
_INDEX = 4


def fill(request: LoadRequest, into: Mapping[str, Any], cast: bool) -> Mapping[str, Any]:
    """Fill each tensor of ``into`` with the tensor of its name."""
    targets = _targets(request, into)
    request.for_files(lambda files: _fill(request, files, targets, cast))
    return into


class _Plan(NamedTuple):
    """The targets that one file fills."""

    reader: _CheckpointReader
    direct: list[Any]
    """Filled by the read itself."""
    copied: list[tuple[str, torch.Tensor, Any]]
    """Filled by a copy from a temporary buffer."""
    compared: list[tuple[str, torch.Tensor, Any]]
    """Filled under an earlier name already; the tensor of this name must be the same."""


def _fill(request: LoadRequest, files: list[SourceFile], targets: dict[str, torch.Tensor], cast: bool) -> None:
    # Every file and target is checked before the first byte changes.
    for plan in _plan(request, files, targets, cast):
        if plan.direct:
            plan.reader.start(plan.direct).finish(request.verify, request.report)
        storages = plan.reader.storages()
        _read_groups(request, plan.reader, plan.copied, storages, _copy)
        _read_groups(request, plan.reader, plan.compared, storages, compare)


def _plan(request: LoadRequest, files: list[SourceFile], targets: dict[str, torch.Tensor], cast: bool) -> list[_Plan]:
    """Find each tensor in the files. Refuse targets that do not fit."""
    plans = []
    # A tensor of a flat state dict is named by its key, even if the key contains dots.
    missing = set(targets)
    filled = FilledMemory()
    for file in files:
        names = file.names
        reader = request.open(file, exact=True)
        storages = reader.storages()
        plan = _Plan(reader, [], [], [])
        tensors = reader.tensors()
        signs = {number: (is_conj, is_neg) for number, is_conj, is_neg in reader.signs()}
        unnamed, met = {*reader.unnamed()}, set[str]()
        named = [(number, *tensor) for number, tensor in enumerate(tensors) if number not in unnamed]
        for number, name, dtype_name, shape, strides, offset, index in named:
            if name in met and name in targets:
                msg = f"{request.name}: the file contains two tensors called {name!r}, so the name is ambiguous"
                raise InvalidArgumentError(f"{msg}; load without into, and copy the tensors")
            if name not in missing or (names is not None and name not in names):
                continue
            met.add(name)
            missing.discard(name)
            target, dtype = targets[name], getattr(torch, dtype_name)
            _check(f"{request.name}: {name}", target, dtype, shape, cast)
            described = (dtype, shape, strides, offset, index, signs.get(number))
            source = (file, described)
            if not target.numel():
                continue
            if earlier := filled.add(request.name, name, target, source):
                # Tied weights: once is enough if the file has them tied as well.
                if earlier != source:
                    plan.compared.append((name, target, described))
            elif _is_direct(target, described, storages[index][1]):
                plan.direct.append(((storages[index][3], target.nbytes, [(index, 0)]), target.detach()))
            else:
                plan.copied.append((name, target, described))
        plans.append(plan)
    if missing:
        shown = ", ".join(sorted(missing)[:5])
        msg = f"{request.name}: the file does not contain {shown}; leave them out of into, or check the names"
        raise KeyError(msg)
    return plans


def _targets(request: LoadRequest, into: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors by name. Each name must be unique."""
    found = list(named_tensors(into))
    targets = dict(found)
    if odd := next((key for key in tensor_keys(into) if not has_name(key)), None):
        msg = f"{request.name}: the key {odd!r} of into has no name in a file: it is neither text nor a whole number"
        raise InvalidArgumentError(f"{msg}; load without into, and copy the tensors")
    if not targets and into:
        msg = f"{request.name}: into has no tensor to fill"
        raise InvalidArgumentError(msg)
    for name, target in targets.items():
        _check_kind(f"{request.name}: {name}", target)
    if len(targets) < len(found):
        counts = Counter(name for name, _ in found)
        twice = next(name for name, count in counts.items() if count > 1)
        ways = [way for (name, _), (way, _) in zip(found, tensor_expressions(into), strict=True) if name == twice]
        msg = f"{request.name}: into has {' and '.join(ways)}, both called {twice!r} in a file; fill them one by one"
        raise InvalidArgumentError(msg)
    return targets


def _check_kind(what: str, target: torch.Tensor) -> None:
    """Refuse a tensor that has no memory of its own for each element."""
    if target.is_meta:
        kind, remedy = "is on the meta device", "give it memory first, with module.to_empty(device=...)"
    elif target.layout is not torch.strided or target.is_nested:
        kind, remedy = "is not a dense tensor", "load the file without into, and assign the tensor"
    elif target.is_quantized:
        kind, remedy = "is quantised", "load the file without into, and assign the tensor"
    elif any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
        kind, remedy = "has elements that share their memory (expand)", "fill a tensor of its own, and expand that"
    else:
        return
    msg = f"{what} {kind} in into, and cannot be filled; {remedy}"
    raise InvalidArgumentError(msg)


def _check(what: str, target: torch.Tensor, dtype: torch.dtype, shape: list[int], cast: bool) -> None:
    if list(target.shape) != shape:
        msg = f"{what} has the shape {shape} in the file, and {list(target.shape)} in into"
        raise InvalidArgumentError(msg)
    if target.dtype != dtype and not cast:
        msg = f"{what} is {dtype} in the file, and {target.dtype} in into; cast=True converts it"
        raise TypeError(msg)


def _is_direct(target: torch.Tensor, described: Any, storage_bytes: int) -> bool:
    """Whether the target needs exactly the bytes of one storage of the file, in their order."""
    dtype, shape, strides, offset, _, signs = described
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    is_plain = (
        signs is None
        and target.layout is torch.strided
        and target.is_contiguous()
        and engine_reaches(target.device)
        and not (target.is_conj() or target.is_neg())
    )
    return is_plain and target.dtype == dtype and offset == 0 and target.nbytes == storage_bytes


def _read_groups(
    request: LoadRequest,
    reader: Any,
    waiting: list[tuple[str, torch.Tensor, Any]],
    storages: Any,
    use: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    """Read whole storages into temporary buffers, group by group. `use` gets what is to be filled, and the source."""
    while waiting:
        group: list[tuple[str, torch.Tensor, Any]] = []
        group_bytes = 0
        while waiting and (not group or group_bytes + storages[waiting[-1][2][_INDEX]][1] <= _GROUP_BYTES):
            group.append(waiting.pop())
            group_bytes += storages[group[-1][2][_INDEX]][1]
        flats: dict[int, Any] = {}
        buffers = []
        for _, _, (*_, index, _) in group:
            _, nbytes, _, place = storages[index]
            if nbytes and index not in flats:
                memory, start = allocate(nbytes)
                view = memoryview(memory)[start : start + nbytes]
                flats[index] = torch.frombuffer(view, dtype=torch.uint8)
                buffers.append(((place, nbytes, [(index, 0)]), view))
        if buffers:
            reader.start(buffers).finish(request.verify, request.report)
        for name, target, (dtype, shape, strides, offset, index, signs) in group:
            storage = flats[index].untyped_storage()
            source = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
            is_conj, is_neg = signs or (False, False)
            source = source.conj() if is_conj else source
            source = torch._neg_view(source) if is_neg else source  # noqa: SLF001
            use(f"{request.name}: {name}", target, source)


def _copy(_what: str, target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
